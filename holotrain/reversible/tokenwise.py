"""Which modules work token by token, so that a sequence can be taken in tiles.

What they return for a token depends on that token alone. This is not guessed from numbers: the module runs on tensors without
data, of several lengths, and every operator that it calls must be known to keep tokens apart. These are pointwise operators,
products with weights, and reductions, norms and softmax over other dimensions. Any other operator, a computation with the
number of tokens, or something that the call leaves behind means no.
"""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from holotrain.reversible.context import recomputing
from holotrain.reversible.reads import is_compiled, is_plain, is_tensor_parallel, parts_of

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
    parts = parts_of(module)
    if x.shape[1] % tile and any(map(is_compiled, parts)):
        # A last tile of another length would have the code of the others compiled anew, before they are recomputed.
        return "it is compiled, and its tokens are no multiple of a tile"
    if _has_hooks(parts):
        return "it has hooks, which would see tiles"
    for leaf in tree_leaves(keywords):
        if isinstance(leaf, Tensor):
            return "it reads tensors besides its input"
        if not isinstance(leaf, bool | int | float | str | torch.dtype | None):
            return f"it gets a {type(leaf).__name__}, which its forward may change"  # such as a cache of keys and values
    return None if trusted else mixes_tokens(module, x, keywords, (tile,))


def _has_hooks(parts: Iterable[nn.Module]) -> bool:
    return any(vars(part)[name] for part in parts for name in _HOOKS)


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class _Verdicts:
    """What was found of a module, by what decides what it does: its input, and the attributes of its parts."""

    def __init__(self) -> None:
        self.calls, self.next_look = 0, 1
        self.reasons: dict[tuple[Any, ...], str | None] = {}


_verdicts: WeakKeyDictionary[nn.Module, _Verdicts] = WeakKeyDictionary()


def mixes_tokens(module: nn.Module, x: Tensor, keywords: dict[str, Any], lengths: tuple[int, ...] = ()) -> str | None:
    """Why a module may not keep the tokens of x (B, T, ...) apart, in words that end a sentence; None: it does.

    Its operators are looked at in its calls 1, 8, 64 ..., where another batch size or twice as many tokens come, and where
    keywords, or the classes, modes or plain attributes of its parts have changed.

    Args:
        keywords: of its forward; no tensors.
        lengths: numbers of tokens at which it must do the same, besides 1 and one of at least T.
    """
    plain = getattr(module, "_orig_mod", module)
    parts, verdicts = parts_of(plain), _verdicts.setdefault(module, _Verdicts())
    if not recomputing():  # which must do what the forward did
        verdicts.calls += 1
        if verdicts.calls == verdicts.next_look:  # a look takes some 50 ms
            verdicts.next_look *= 8
            verdicts.reasons.clear()
    lengths = (1, *lengths, 2 ** (x.shape[1] - 1).bit_length())
    shape = (x.shape[0], *x.shape[2:], x.dtype, x.device.type, torch.is_autocast_enabled(x.device.type))
    key = (lengths, shape, repr(keywords), *map(_settings_of, parts))
    if key not in verdicts.reasons:
        verdicts.reasons[key] = _reason(plain, parts, x, keywords, lengths)
    return verdicts.reasons[key]


def _settings_of(part: nn.Module) -> tuple[Any, ...]:
    forward = vars(part).get("forward")
    plain = (value if not isinstance(value, list | tuple) else repr(value) for value in vars(part).values() if is_plain(value))
    return type(part), getattr(forward, "__code__", forward), *(value for value in plain if not isinstance(value, dict))


def _reason(
    module: nn.Module, parts: list[nn.Module], x: Tensor, keywords: dict[str, Any], lengths: tuple[int, ...]
) -> str | None:
    if is_tensor_parallel(module):
        return "its weights are divided among processes"
    primes = _primes_without_multiples(parts, x)
    before, random_before = attributes_of(parts), random.getstate()
    try:
        with torch.enable_grad(), _without_data(x), _no_cached_casts(), _eager(parts), _no_gradients_of_its_own():
            calls = [_operators_of(module.forward, x, keywords, length) for length in primes]
            others = [_calls_at(module.forward, x, keywords, length) for length in lengths]
        same = calls[0] == calls[1] and all(map(partial(_are_the_same, calls[0]), others, lengths))
        reason = None if same else "it computes with the number of tokens"
    except _MixesTokens as found:
        reason = str(found)
    except Exception as error:  # of a module that takes no other length, or reads values: of many kinds
        reason = f"it does not run on a tensor without data ({type(error).__name__})"
    if put_back_attributes(before) or random.getstate() != random_before:
        random.setstate(random_before)
        reason = "its forward changes attributes or draws numbers outside of torch"
    return reason


def _primes_without_multiples(parts: Iterable[nn.Module], x: Tensor) -> tuple[int, int]:
    """Two lengths of which no size is a multiple, so that a dimension with a multiple of them is that of the tokens."""
    sizes = {size for part in parts for each in part._parameters.values() if each is not None for size in each.shape}
    sizes |= {*x.shape} - {x.shape[1]}
    good = [prime for prime in (1009, 1013, 1019, 1021, 1031, 1033, 1039) if all(size % prime for size in sizes)]
    return good[0], good[1]


@contextmanager
def _without_data(x: Tensor):
    """New tensors have no data, and whatever counts operators or memory, as a plan does, does not see them."""
    mode = x.fake_mode if isinstance(x, FakeTensor) else FakeTensorMode(allow_non_fake_inputs=True)
    log = logging.getLogger("torch._subclasses.fake_tensor")  # of operators that do not suit the shapes
    disabled, log.disabled = log.disabled, True
    try:
        with _disable_current_modes(), mode:
            yield
    finally:
        log.disabled = disabled


_looking: ContextVar[bool] = ContextVar("looking at operators", default=False)


@contextmanager
def _no_gradients_of_its_own():
    """Inside, this thread may call no Function and register no hook: what they do to gradients cannot be looked at."""
    function, tensor = torch.autograd.Function, Tensor
    apply, register_hook = vars(function)["apply"], tensor.register_hook

    def apply_known(kind, *arguments, **keywords):
        if _looking.get() and not getattr(kind, "keeps_tokens_apart", False):
            raise _MixesTokens(f"it calls {kind.__name__}, whose backward is its own")
        return apply.__get__(None, kind)(*arguments, **keywords)

    def refuse_hook(self, hook):
        if _looking.get():
            raise _MixesTokens("it registers a hook, which would see the gradients of tiles")
        return register_hook(self, hook)

    token, function.apply, tensor.register_hook = _looking.set(True), classmethod(apply_known), refuse_hook
    try:
        # No hooks of a recomputation around it, and nothing is kept for a backward that never comes.
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
            yield
    finally:
        _looking.reset(token)
        function.apply, tensor.register_hook = apply, register_hook


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
    """The lists, dicts and sets that a module holds, and what is in them."""
    held = [value for value in vars(part).values() if isinstance(value, list | dict | set)]
    return [(each, each.copy()) for each in held]


def attributes_of(parts: Iterable[nn.Module]) -> list:
    """What :func:`put_back_attributes` needs."""
    return [(part, dict(vars(part)), _contents(part)) for part in parts]


def put_back_attributes(before: list) -> bool:
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
    stream = x.new_empty(x.shape[0], length, *x.shape[2:]).requires_grad_(x.is_floating_point())
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


class _Calls(TorchDispatchMode):
    """Lists the operators of a call, with their plain arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[Any]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        if func.namespace != "prim":
            plain = [each for each in tree_leaves((args, kwargs or {})) if not isinstance(each, Tensor)]
            self.calls.append((str(func), plain))
        return func(*args, **(kwargs or {}))


def _calls_at(forward: Callable, x: Tensor, keywords: dict[str, Any], length: int) -> list[tuple[str, list[Any]]]:
    stream = x.new_empty(x.shape[0], length, *x.shape[2:]).requires_grad_(x.is_floating_point())
    with _Calls() as listed:
        forward(stream, **keywords)
    return listed.calls


def _are_the_same(known: list[Any], calls: list[tuple[str, list[Any]]], length: int) -> bool:
    """Whether operators are those of :func:`_operators_of`, at another length."""
    if [name for name, _ in known] != [name for name, _ in calls]:
        return False
    pairs = [pair for (_, mine), (_, theirs) in zip(known, calls, strict=True) for pair in zip(mine, theirs, strict=True)]
    return all(each == mine * length if isinstance(mine, int) else str(each) == mine for mine, each in pairs)


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
        own: ids of those whose memory was made in this call.
        calls: the operators, with their plain arguments.
    """

    def __init__(self, length: int, stream: Tensor) -> None:
        super().__init__()
        self.length = length
        self.places = {id(stream): _Tokens(1, 1)}
        self.alive = [stream]
        self.own: set[int] = set()
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
        is_view = any(value.alias_info is not None for value in func._schema.returns)
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if tracked and func not in _READS_NOTHING:
            found = self._place(func, args, kwargs, made)
            for each in made:
                self.places[id(each)] = found
        elif torch.Tag.nondeterministic_seeded in func.tags:
            raise _MixesTokens("it draws random numbers that tokens share")
        self.alive += made
        if not is_view or any(id(each) in self.own for each in leaves[:1]):
            self.own |= {*map(id, made)}
        return result

    def _in_lengths(self, value: Any) -> Any:
        is_multiple = isinstance(value, int) and value and value % self.length == 0
        return value // self.length if is_multiple else str(value)

    def _require_own(self, func: OpOverload, args: tuple, kwargs: dict) -> None:
        """What is changed in place must have been made in this call."""
        for place, argument in enumerate(func._schema.arguments):
            changed = args[place] if place < len(args) else kwargs.get(argument.name)
            if argument.is_write and isinstance(changed, Tensor) and id(changed) not in self.own:
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
