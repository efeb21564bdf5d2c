"""Where the tokens are in the result of an operator, and whether the operator keeps them apart.

A :class:`TokenWatch` follows the dimension of the tokens through the operators of a call. Each must have a rule here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten


class MixesTokens(Exception):
    """What an operator does, in words that end a sentence."""


class Tokens(NamedTuple):
    """Which dimension of a tensor is that of the tokens, and how many rows it holds: (B, T, C) -> 1, 1; (B T, C) -> 0, B."""

    axis: int
    rows: int


class TokenWatch(TorchDispatchMode):
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
        self.places = {id(stream): Tokens(1, 1)}
        self.alive = [stream]
        self.own: set[int] = set()
        self.calls: list[Any] = []

    def tokens_of(self, value: Any) -> Tokens | None:
        return self.places.get(id(value))

    def require_tokens(self, tensor: Tensor) -> Tokens:
        place = self.tokens_of(tensor)
        if place is None:
            raise MixesTokens("it computes with tokens in several tensors")
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
            raise MixesTokens("it draws random numbers that tokens share")
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
                raise MixesTokens("its forward changes a buffer or its input")

    def _place(self, func: OpOverload, args: tuple, kwargs: dict, made: list[Tensor]) -> Tokens:
        """Where the tokens are in the result."""
        rule = _RULES.get(func)
        if rule is None and torch.Tag.pointwise in func.tags:
            rule = _pointwise
        if rule is None:
            raise MixesTokens(f"{func} may mix tokens")
        values = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        found = rule(self, values, made[0])
        if found is None or made[0].shape[found.axis] != found.rows * self.length:
            raise MixesTokens(f"{func} mixes tokens")
        return found


Rule = Callable[[TokenWatch, dict[str, Any], Tensor], Tokens | None]
"""Arguments of an operator by name, and its result -> where the tokens are; None: they may be mixed."""


def _pointwise(watch: TokenWatch, values: dict[str, Any], out: Tensor) -> Tokens | None:
    tensors = [each for each in tree_leaves(values) if isinstance(each, Tensor)]
    return _aligned(watch, tensors, out)


def _aligned(watch: TokenWatch, tensors: list[Tensor], out: Tensor) -> Tokens | None:
    """Tensors that are broadcast together have their tokens in one dimension, counted from the last, or one entry there."""
    found = {(tensor.ndim - place.axis, place.rows) for tensor in tensors if (place := watch.tokens_of(tensor))}
    if len(found) != 1:
        return None
    ((from_end, rows),) = found
    for tensor in tensors:
        if watch.tokens_of(tensor) is None and tensor.ndim >= from_end and tensor.shape[-from_end] != 1:
            return None
    return Tokens(out.ndim - from_end, rows)


def _reshaped(watch: TokenWatch, values: dict[str, Any], out: Tensor) -> Tokens | None:
    """The dimensions behind the tokens keep their elements, so that a row of the flat tensor is one of a token."""
    x = values["self"]
    place = watch.require_tokens(x)
    behind = x.shape[place.axis + 1 :].numel()
    for axis, size in enumerate(out.shape):
        if out.shape[axis + 1 :].numel() == behind and size and size % watch.length == 0:
            return Tokens(axis, size // watch.length)
    return None


def _moved(watch: TokenWatch, values: dict[str, Any], out: Tensor) -> Tokens | None:
    """A view whose dimensions are those of its input in another order, with others of size one added or removed."""
    place = watch.require_tokens(values["self"])
    size, stride = place.rows * watch.length, values["self"].stride(place.axis)
    axes = [axis for axis in range(out.ndim) if (out.shape[axis], out.stride(axis)) == (size, stride)]
    return Tokens(axes[0], place.rows) if len(axes) == 1 else None


def _along(watch: TokenWatch, values: dict[str, Any], out: Tensor) -> Tokens | None:
    """What works along dimensions other than that of the tokens: reductions, softmax, cuts."""
    x = values["self"]
    place, dims = watch.require_tokens(x), values.get("dim", 0)
    if dims is None or dims == []:
        return None
    dims = [dim % x.ndim for dim in (dims if isinstance(dims, list | tuple) else [dims])]
    if place.axis in dims:
        return None
    gone = sum(dim < place.axis for dim in dims) if out.ndim < x.ndim else 0
    return Tokens(place.axis - gone, place.rows)


def _cut_last(watch: TokenWatch, values: dict[str, Any], out: Tensor) -> Tokens | None:
    return _along(watch, {"dim": -1} | values, out)


def _joined(watch: TokenWatch, values: dict[str, Any], out: Tensor) -> Tokens | None:
    tensors = values["tensors"]
    places = {watch.tokens_of(tensor) for tensor in tensors}
    place = next(iter(places))
    dim = values.get("dim", 0) % tensors[0].ndim
    return place if len(places) == 1 and place is not None and dim != place.axis else None


def _normalised(watch: TokenWatch, values: dict[str, Any], out: Tensor) -> Tokens | None:
    place = watch.tokens_of(values["input"])
    return place if place is not None and place.axis < out.ndim - len(values["normalized_shape"]) else None


def _product(watch: TokenWatch, values: dict[str, Any], out: Tensor) -> Tokens | None:
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
    return Tokens(columns, other.rows) if other and other.axis == columns and "mat1" not in values else None


def _looked_up(watch: TokenWatch, values: dict[str, Any], out: Tensor) -> Tokens | None:
    return None if watch.tokens_of(values["weight"]) else watch.tokens_of(values["indices"])


def _same_shape(watch: TokenWatch, values: dict[str, Any], out: Tensor) -> Tokens | None:
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
