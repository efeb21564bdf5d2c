"""Which modules work token by token, so that a sequence can be taken in tiles.

What they return for a token depends on that token alone. This is not guessed from numbers: the module runs on tensors without
data, of two lengths, and every operator that it calls must be known to keep tokens apart. These are pointwise operators,
products with weights, and reductions, norms and softmax over other dimensions. Any other operator, a computation with the
number of tokens, or something that the call leaves behind means no.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from holotrain.reversible.reads import is_compiled, is_tensor_parallel, parts_of

aten = torch.ops.aten


def require_tile(tile: int | None) -> None:
    """Raises a ValueError for what is neither None nor a number of tokens."""
    if tile is not None and (not isinstance(tile, int) or isinstance(tile, bool) or tile < 1):
        raise ValueError(f"tile must be a number of tokens or None, not {tile!r}")


def tiles_of(x: Tensor, tile: int) -> list[slice]:
    """The tiles of x (B, T, ...), along T."""
    return [slice(start, min(start + tile, x.shape[1])) for start in range(0, x.shape[1], tile)]


def why_whole(module: nn.Module, tile: int, x: Tensor, keywords: dict[str, Any], trusted: bool = False) -> str | None:
    """Why a module takes x whole, in words that end a sentence; None: it takes it in tiles.

    Args:
        trusted: it is known to keep tokens apart.
    """
    if x.ndim != 3 or x.shape[1] <= tile:
        return "its input has no more tokens than a tile" if x.ndim == 3 else "its input is not (B, T, C)"
    if torch.compiler.is_compiling():
        return "it is being compiled"
    if x.shape[1] % tile and any(map(is_compiled, parts_of(module))):
        # A last tile of another length would have the code of the others compiled anew, before they are recomputed.
        return "it is compiled, and its tokens are no multiple of a tile"
    return None if trusted else mixes_tokens(module, x, keywords)


_reasons: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], str | None]] = WeakKeyDictionary()
"""What was found of a module, by the classes, modes and plain attributes of its parts, which decide what it does."""


def mixes_tokens(module: nn.Module, x: Tensor, keywords: dict[str, Any]) -> str | None:
    """Why a module may not keep the tokens of x (B, T, ...) apart, in words that end a sentence; None: it does.

    Its operators are looked at once, and again where the classes, modes or plain attributes of its parts have changed.
    """
    for leaf in tree_leaves(keywords):
        if isinstance(leaf, Tensor):
            return "it reads tensors besides its input"
        if not isinstance(leaf, bool | int | float | str | torch.dtype | None):
            return f"it gets a {type(leaf).__name__}, which its forward may change"  # such as a cache of keys and values
    plain = getattr(module, "_orig_mod", module)
    parts = parts_of(plain)
    if any(part._forward_pre_hooks or part._forward_hooks or part._backward_hooks for part in parts):
        return "it has hooks, which would see tiles"
    found = _reasons.setdefault(module, {})
    key = (x.dtype, x.device.type, torch.is_autocast_enabled(x.device.type), *map(_settings_of, parts))
    if key not in found:
        found[key] = _reason(plain, parts, x, keywords)
    return found[key]


def _settings_of(part: nn.Module) -> tuple[Any, ...]:
    plain = (value for value in vars(part).values() if isinstance(value, bool | int | float | str))
    return type(part), id(vars(part).get("forward")), *plain


def _reason(module: nn.Module, parts: list[nn.Module], x: Tensor, keywords: dict[str, Any]) -> str | None:
    if is_tensor_parallel(module):
        return "its weights are divided among processes"
    lengths = _primes_that_divide_no_size(parts, x)
    before = [(part, dict(vars(part)), _contents(part)) for part in parts]
    random_before = random.getstate()
    try:
        with torch.no_grad(), _without_data(x), _no_cached_casts(), _eager(parts):
            calls = [_operators_of(module.forward, x, keywords, length) for length in lengths]
        reason = None if calls[0] == calls[1] else "it computes with the number of tokens"
    except _MixesTokens as found:
        reason = str(found)
    except Exception as error:  # of a module that takes no other length, or reads values: of many kinds
        reason = f"it does not run on a tensor without data ({type(error).__name__})"
    if _put_back(before) or random.getstate() != random_before:
        random.setstate(random_before)
        reason = reason or "its forward changes attributes or draws numbers outside of torch"
    return reason


def _primes_that_divide_no_size(parts: Iterable[nn.Module], x: Tensor) -> tuple[int, int]:
    """Two lengths, so that a dimension with a multiple of them is that of the tokens."""
    sizes = {size for part in parts for each in part._parameters.values() if each is not None for size in each.shape}
    sizes |= {*x.shape} - {x.shape[1]}
    good = [prime for prime in (1009, 1013, 1019, 1021, 1031, 1033, 1039) if all(size % prime for size in sizes)]
    return good[0], good[1]


@contextmanager
def _without_data(x: Tensor):
    """New tensors have no data, and whatever counts operators or memory, as a plan does, does not see them."""
    mode = x.fake_mode if isinstance(x, FakeTensor) else FakeTensorMode(allow_non_fake_inputs=True)
    with _disable_current_modes(), mode:
        yield


@contextmanager
def _no_cached_casts():
    """A weight without data must not stay in the cache of autocast."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _eager(parts: Iterable[nn.Module]) -> AbstractContextManager:
    return torch.compiler.set_stance("force_eager") if any(map(is_compiled, parts)) else nullcontext()


def _contents(part: nn.Module) -> list[tuple[Any, Any]]:
    """The containers and buffers that a module holds, and what is in them."""
    held = [value for value in vars(part).values() if isinstance(value, list | dict | set)]
    return [(each, each.copy()) for each in held]


def _put_back(before: list) -> bool:
    """Gives modules their attributes back; whether they had others."""
    changed = False
    for part, attributes, contents in before:
        if vars(part).keys() != attributes.keys() or any(vars(part)[key] is not value for key, value in attributes.items()):
            changed = True
            vars(part).clear()
            vars(part).update(attributes)
        for container, held in contents:
            if len(container) != len(held) or container != held:
                changed = True
                container.clear()
                container.extend(held) if isinstance(container, list) else container.update(held)
    return changed


class _MixesTokens(Exception):
    """What an operator does, in words that end a sentence."""


class _Tokens(NamedTuple):
    """Which dimension of a tensor is that of the tokens, and how many rows it holds: (B, T, C) -> 1, 1; (B T, C) -> 0, B."""

    axis: int
    rows: int


def _operators_of(forward: Callable, x: Tensor, keywords: dict[str, Any], length: int) -> list[Any]:
    """The operators of a call on tensors of some length, with their plain arguments in terms of the length."""
    stream = x.new_empty(x.shape[0], length, *x.shape[2:])
    with _Watch(length, stream) as watch:
        result = forward(stream, **keywords)
    if not isinstance(result, Tensor) or result is stream or result.ndim < 3 or watch.tokens_of(result) != _Tokens(1, 1):
        raise _MixesTokens("it does not return one new tensor with the tokens in their place")
    made, watch.alive = [ref(each) for each in watch.alive], []
    del result, stream
    if any(each() is not None for each in made):
        gc.collect()
    left = [tensor for each in made if (tensor := each()) is not None]
    if left:
        _remove_from_containers(left)
        raise _MixesTokens("its forward leaves a tensor behind, in an attribute or a list")
    return watch.calls


def _remove_from_containers(tensors: list[Tensor]) -> None:
    """Tensors without data must not stay in a list or dict of somebody's."""
    for tensor in tensors:
        for holder in gc.get_referrers(tensor):
            if isinstance(holder, list) and holder is not tensors:
                holder[:] = [each for each in holder if each is not tensor]
            elif isinstance(holder, dict):
                for key in [key for key, each in holder.items() if each is tensor]:
                    del holder[key]


class _Watch(TorchDispatchMode):
    """Follows the dimension of the tokens through the operators of a call, and refuses those that may mix tokens.

    Attributes:
        places: the dimension of the tokens, by the id of each tensor that has one.
        alive: these tensors, so that no id is used twice.
        calls: the operators, with their plain arguments.
    """

    def __init__(self, length: int, stream: Tensor) -> None:
        super().__init__()
        self.length = length
        self.places = {id(stream): _Tokens(1, 1)}
        self.alive = [stream]
        self.calls: list[Any] = []

    def tokens_of(self, value: Any) -> _Tokens | None:
        return self.places.get(id(value))

    def require_tokens(self, tensor: Tensor) -> _Tokens:
        place = self.tokens_of(tensor)
        if place is None:
            raise _MixesTokens("it computes with tokens in several tensors")
        return place

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks for the device or the layout
            return func(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        tracked = [each for each in leaves if isinstance(each, Tensor) and self.tokens_of(each)]
        if func._schema.is_mutable:
            self._require_own(func, args, kwargs)
        result = func(*args, **kwargs)
        plain = [each for each in leaves if not isinstance(each, Tensor)]
        self.calls.append((str(func), [self._in_lengths(each) if func in _TAKES_SIZES else str(each) for each in plain]))
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if tracked and func not in _READS_NOTHING:
            found = self._place(func, args, kwargs, made)
            for each in made:
                self.places[id(each)] = found
        elif torch.Tag.nondeterministic_seeded in func.tags:
            raise _MixesTokens("it draws random numbers that tokens share")
        self.alive += made
        return result

    def _in_lengths(self, value: Any) -> Any:
        is_multiple = isinstance(value, int) and value and value % self.length == 0
        return ("lengths", value // self.length) if is_multiple else str(value)

    def _require_own(self, func: OpOverload, args: tuple, kwargs: dict) -> None:
        """What is changed in place must have been made in this call."""
        for place, argument in enumerate(func._schema.arguments):
            changed = args[place] if place < len(args) else kwargs.get(argument.name)
            if argument.is_write and isinstance(changed, Tensor) and all(changed is not each for each in self.alive[1:]):
                raise _MixesTokens("its forward changes a buffer or its input")

    def _place(self, func: OpOverload, args: tuple, kwargs: dict, made: list[Tensor]) -> _Tokens:
        """Where the tokens are in the result."""
        rule = _RULES.get(func)
        if rule is None and torch.Tag.pointwise in func.tags:
            rule = _pointwise
        if rule is None:
            raise _MixesTokens(f"{func} may mix tokens")
        values = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        found = rule(self, values, made[0])
        if found is None or made[0].shape[found.axis] != found.rows * self.length:
            raise _MixesTokens(f"{func} mixes tokens")
        return found


Rule = Callable[[_Watch, dict[str, Any], Tensor], _Tokens | None]
"""Arguments of an operator by name, and its result -> where the tokens are; None: they may be mixed."""


def _pointwise(watch: _Watch, values: dict[str, Any], out: Tensor) -> _Tokens | None:
    tensors = [each for each in tree_leaves(values) if isinstance(each, Tensor)]
    return _aligned(watch, tensors, out)


def _aligned(watch: _Watch, tensors: list[Tensor], out: Tensor) -> _Tokens | None:
    """Tensors that are broadcast together have their tokens in one dimension, counted from the last, or one entry there."""
    found = {(tensor.ndim - place.axis, place.rows) for tensor in tensors if (place := watch.tokens_of(tensor))}
    if len(found) != 1:
        return None
    ((from_end, rows),) = found
    for tensor in tensors:
        if watch.tokens_of(tensor) is None and tensor.ndim >= from_end and tensor.shape[-from_end] != 1:
            return None
    return _Tokens(out.ndim - from_end, rows)


def _reshaped(watch: _Watch, values: dict[str, Any], out: Tensor) -> _Tokens | None:
    """The dimensions behind the tokens keep their elements, so that a row of the flat tensor is one of a token."""
    x = values["self"]
    place = watch.require_tokens(x)
    behind = x.shape[place.axis + 1 :].numel()
    for axis, size in enumerate(out.shape):
        if out.shape[axis + 1 :].numel() == behind and size and size % watch.length == 0:
            return _Tokens(axis, size // watch.length)
    return None


def _moved(watch: _Watch, values: dict[str, Any], out: Tensor) -> _Tokens | None:
    """A view whose dimensions are those of its input in another order, with others of size one added or removed."""
    place = watch.require_tokens(values["self"])
    size, stride = place.rows * watch.length, values["self"].stride(place.axis)
    axes = [axis for axis in range(out.ndim) if (out.shape[axis], out.stride(axis)) == (size, stride)]
    return _Tokens(axes[0], place.rows) if len(axes) == 1 else None


def _along(watch: _Watch, values: dict[str, Any], out: Tensor) -> _Tokens | None:
    """What works along dimensions other than that of the tokens: reductions, softmax, cuts."""
    x = values["self"]
    place, dims = watch.require_tokens(x), values.get("dim", 0)
    if dims is None or dims == []:
        return None
    dims = [dim % x.ndim for dim in (dims if isinstance(dims, list | tuple) else [dims])]
    if place.axis in dims:
        return None
    gone = sum(dim < place.axis for dim in dims) if out.ndim < x.ndim else 0
    return _Tokens(place.axis - gone, place.rows)


def _cut_last(watch: _Watch, values: dict[str, Any], out: Tensor) -> _Tokens | None:
    return _along(watch, {"dim": -1} | values, out)


def _joined(watch: _Watch, values: dict[str, Any], out: Tensor) -> _Tokens | None:
    tensors = values["tensors"]
    places = {watch.tokens_of(tensor) for tensor in tensors}
    place = next(iter(places))
    dim = values.get("dim", 0) % tensors[0].ndim
    return place if len(places) == 1 and place is not None and dim != place.axis else None


def _normalised(watch: _Watch, values: dict[str, Any], out: Tensor) -> _Tokens | None:
    place = watch.tokens_of(values["input"])
    return place if place is not None and place.axis < out.ndim - len(values["normalized_shape"]) else None


def _product(watch: _Watch, values: dict[str, Any], out: Tensor) -> _Tokens | None:
    """A product of matrices with weights: the tokens are rows of the left one or columns of the right one."""
    left, right, bias = values.get("mat1", values["self"]), values["mat2"], values["self"]
    mine, other = watch.tokens_of(left), watch.tokens_of(right)
    if "mat1" in values and (watch.tokens_of(bias) or (bias.ndim == out.ndim and bias.shape[0] != 1)):
        return None
    rows, columns = out.ndim - 2, out.ndim - 1
    if mine and other:  # a product for each token
        return mine if out.ndim == 3 and mine == other and mine.axis == 0 else None
    if mine:
        return mine if mine.axis == rows else None
    return _Tokens(columns, other.rows) if other and other.axis == columns and "mat1" not in values else None


def _looked_up(watch: _Watch, values: dict[str, Any], out: Tensor) -> _Tokens | None:
    return None if watch.tokens_of(values["weight"]) else watch.tokens_of(values["indices"])


def _same_shape(watch: _Watch, values: dict[str, Any], out: Tensor) -> _Tokens | None:
    """An operator on each element of its first argument."""
    return watch.tokens_of(next(value for value in values.values() if isinstance(value, Tensor)))


def _overloads(names: str) -> list[OpOverload]:
    pairs = [name.partition(".")[::2] for name in names.split() if hasattr(aten, name.partition(".")[0])]
    return [getattr(getattr(aten, packet), overload or "default") for packet, overload in pairs]


_TAKES_SIZES = frozenset(_overloads("view _unsafe_view _reshape_alias expand"))
"""Operators to which the number of tokens may be given: the place of the tokens in their results is known."""

_READS_NOTHING = frozenset(_overloads("new_empty new_zeros new_ones new_full"))
"""Operators that take no more than dtype and device from a tensor."""

_RULES: dict[OpOverload, Rule] = {
    operator: rule
    for rule, names in {
        _reshaped: "view _unsafe_view _reshape_alias",
        _moved: "permute transpose.int t unsqueeze squeeze.dim squeeze squeeze.dims expand",
        _along: "sum.dim_IntList mean.dim amax amin var.correction linalg_vector_norm logsumexp _softmax _log_softmax "
        "slice.Tensor select.int split.Tensor split_with_sizes unbind.int",
        _cut_last: "glu",
        _joined: "cat",
        _normalised: "native_layer_norm _fused_rms_norm",
        _product: "mm addmm bmm",
        _looked_up: "embedding",
        _same_shape: "clone detach alias _to_copy native_dropout bernoulli bernoulli.p bernoulli_.float rand_like randn_like "
        "zeros_like ones_like full_like empty_like",
    }.items()
    for operator in _overloads(names)
}
"""Operators that keep tokens apart, beside the pointwise ones."""
