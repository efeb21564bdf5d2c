"""Logits that are not computed yet: those of a head and hidden states, with what is to be done to each of them.

Shifts and reshapes of tokens act on the hidden states. Torch's ``cross_entropy`` takes them in tiles; whatever else reads them
gets them whole.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from functools import partial
from types import EllipsisType
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from holotrain.reversible import loss_ops
from holotrain.reversible.reads import version_of
from holotrain.reversible.tiled_cross_entropy import LOGITS, Head, Step, Tiles, Unreadable

MOST_LOGITS = {"cuda": 2**27, "cpu": 2**23}
"""Numbers in the logits of a tile, at most."""


_warned: WeakSet[Any] = WeakSet()
"""Heads of which a warning has said that their logits are computed whole."""


class _Family:
    """All pending logits of one call of a head, in the order in which they were made."""

    def __init__(self) -> None:
        self.members: list[ref[PendingLogits]] = []
        self.are_whole = False

    def compute(self) -> None:
        """Computes all that are alive, as they would have been without tiles: some are views of others."""
        self.are_whole = True
        for member in self.members:
            if (logits := member()) is not None:
                logits.require_unchanged()
                logits.whole = logits.make()


class PendingLogits(Tensor):
    """Logits that are not computed yet: those of a head and hidden states, with some functions of each of them.

    They know their shape, dtype and device. :func:`torch.nn.functional.cross_entropy` takes them in tiles. Any other function
    gets :meth:`value`, which is computed as it would have been without tiles; all that follows gets it, too.

    Attributes:
        hidden: (..., C), with their graph.
        empty: such logits of no tokens, (0, V).
        make: how they are computed.
        whole: the logits, if they have been computed; else None.
    """

    head: Head
    hidden: Tensor
    steps: tuple[Step, ...]
    most: int
    empty: Tensor
    family: _Family
    make: Callable[[], Tensor]
    whole: Tensor | None
    read: list[Tensor]
    versions: list[int]

    @staticmethod
    def of_head(head: Head, hidden: Tensor, most: int | None = None) -> PendingLogits:
        empty = head.forward(hidden.detach().reshape(-1, hidden.shape[-1])[:0])
        most = most or MOST_LOGITS.get(hidden.device.type, 2**27)
        return PendingLogits.of(head, hidden, most, (), empty, _Family(), partial(head.forward, hidden))

    @staticmethod
    def of(
        head: Head,
        hidden: Tensor,
        most: int,
        steps: tuple[Step, ...],
        empty: Tensor,
        family: _Family,
        make: Callable[[], Tensor],
    ) -> PendingLogits:
        learns = torch.is_grad_enabled() and (empty.requires_grad or hidden.requires_grad)
        shape = (*hidden.shape[:-1], empty.shape[-1])
        pending = Tensor._make_wrapper_subclass(
            PendingLogits, shape, dtype=empty.dtype, device=hidden.device, requires_grad=learns
        )
        pending.head, pending.hidden, pending.steps, pending.most, pending.empty = head, hidden, steps, most, empty
        pending.family, pending.make, pending.whole = family, make, None
        pending.read = [hidden, *(each for each in head.weights or () if each is not None)]
        pending.versions = [*map(version_of, pending.read)]
        family.members.append(ref(pending))
        return pending

    def require_unchanged(self) -> None:
        if [*map(version_of, self.read)] != self.versions:
            raise Unreadable("its hidden states, or the weight of its head, are changed in place before the loss")

    def then(self, step: Step) -> PendingLogits:
        steps, empty = (*self.steps, step), step(self.empty)
        make = partial(lambda before: step(before.whole), self)
        return PendingLogits.of(self.head, self.hidden, self.most, steps, empty, self.family, make)

    def of_hidden(self, hidden: Tensor, make: Callable[[Tensor], Tensor]) -> PendingLogits:
        """The logits of some tokens, or of tokens in another shape; ``make`` gets them of these logits."""
        whole = partial(lambda before: make(before.whole), self)
        return PendingLogits.of(self.head, hidden, self.most, self.steps, self.empty, self.family, whole)

    def value(self) -> Tensor:
        """The logits, with their graph."""
        if self.whole is None:
            self.family.compute()
        assert self.whole is not None
        return self.whole

    def steps_of_tiles(self) -> tuple[Step, ...]:
        """The steps without a last one from half precision to fp32, in which the loss of a tile is computed anyway."""
        last = self.steps[-1] if self.steps else None
        is_cast = last is not None and last.name in ("float", "to") and last.given in loss_ops.HALF
        return self.steps[:-1] if is_cast and self.dtype == torch.float32 else self.steps

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        is_set = name == "__set__"
        if is_set or name == "__get__":
            name = func.__self__.__name__  # that of the property
        with torch._C.DisableTorchFunctionSubclass():
            if name in _OF_SHAPE and not is_set:
                return func(*args, **kwargs)
            pending = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, PendingLogits))
            if pending.requires_grad and not torch.is_grad_enabled():  # maybe within a Function with a backward of its own
                raise Unreadable(f"{name} reads its logits without gradients")
            if not pending.family.are_whole and any(isinstance(each, PendingLogits) for each in args):
                done = _RULES[name](func, args, kwargs) if name in _RULES else None
                if done is not None:
                    return done
            if is_set or name in _OF_THE_GRAPH:
                raise Unreadable(f"{name} reads the graph of its logits")
            if (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or "out" in kwargs:
                raise Unreadable(f"{name} changes its logits")
            if not pending.family.are_whole and (module := pending.head.module) is not None and module not in _warned:
                _warned.add(module)
                warnings.warn(f"the logits are computed whole, since {name} reads them", stacklevel=3)
            args, kwargs = tree_map_only(PendingLogits, PendingLogits.value, (args, kwargs))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # ty: ignore[incompatible-method-override]
        raise Unreadable(f"{func} reads its logits outside of torch's functions")


_OF_SHAPE = {
    *("size", "dim", "ndimension", "numel", "nelement", "is_floating_point", "is_complex", "__len__", "get_device"),
    *("shape", "dtype", "device", "layout", "requires_grad", "ndim", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_mps"),
    *("itemsize", "nbytes", "is_nested", "is_quantized", "is_xpu"),
}
"""Functions and properties that ask for no number."""

_OF_THE_GRAPH = {
    *("register_hook", "retain_grad", "register_post_accumulate_grad_hook", "backward", "requires_grad_", "detach_"),
    *("grad_fn", "is_leaf", "grad", "data", "_base", "_version", "output_nr", "retains_grad", "_backward_hooks"),
}


def _each_logit(func: Callable, args: tuple, kwargs: dict) -> PendingLogits | None:
    """A function of each logit by itself, maybe with a number or a tensor that has one entry or one for each word.

    Tensors are copied: what is changed in place later does not change these logits.
    """
    pending = [each for each in args if isinstance(each, PendingLogits)]
    if len(pending) != 1 or any(isinstance(each, Tensor | torch.device | str) for each in kwargs.values()):
        return None
    logits, own = pending[0], []
    for each in args:
        if isinstance(each, torch.device | str):
            return None
        if isinstance(each, Tensor) and each is not logits:
            fits = each.numel() == 1 or (each.numel() == logits.shape[-1] == each.shape[-1])
            if not fits or each.ndim > logits.ndim or each.device != logits.device:
                return None
            each = each.clone().flatten()
        own.append(LOGITS if each is logits else each)
    step = Step(func, tuple(own), kwargs, logits.dtype)
    return logits.then(step) if step(logits.empty.detach()).is_floating_point() else None


def _same(func: Callable, args: tuple, kwargs: dict) -> PendingLogits:
    return args[0]


def _reshaped(func: Callable, args: tuple, kwargs: dict) -> PendingLogits | None:
    logits, *sizes = args
    sizes = list(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes
    if kwargs or not isinstance(logits, PendingLogits) or not sizes or sizes[-1] != logits.shape[-1]:
        return None
    rest = logits.hidden.shape[:-1].numel()
    given = math.prod(size for size in sizes[:-1] if size != -1)
    of_tokens = [rest // max(given, 1) if size == -1 else size for size in sizes[:-1]]
    return logits.of_hidden(
        logits.hidden.reshape(*of_tokens, logits.hidden.shape[-1]), lambda whole: func(whole, *of_tokens, whole.shape[-1])
    )


def _flattened(func: Callable, args: tuple, kwargs: dict) -> PendingLogits | None:
    logits, start, end = (*args, *[kwargs.get(name, default) for name, default in _ENDS[len(args) - 1 :]])
    if end % logits.ndim == logits.ndim - 1:
        return None
    start, end = start % logits.ndim, end % logits.ndim
    return logits.of_hidden(logits.hidden.flatten(start, end), lambda whole: whole.flatten(start, end))


_ENDS = [("start_dim", 0), ("end_dim", -1)]


def _chosen(func: Callable, args: tuple, kwargs: dict) -> PendingLogits | None:
    """Some tokens: an index of numbers, slices and tensors that leaves the words as they are."""
    logits, index = args
    places = list(index) if isinstance(index, tuple) else [index]
    if not isinstance(logits, PendingLogits) or not all(
        isinstance(place, int | slice | Tensor | EllipsisType) for place in places
    ):
        return None
    taken = sum(place.ndim if isinstance(place, Tensor) and place.dtype in _MASKS else 1 for place in places)
    if Ellipsis in [place for place in places if not isinstance(place, Tensor)]:
        where = next(number for number, place in enumerate(places) if place is Ellipsis)
        places[where : where + 1] = [slice(None)] * (logits.ndim - taken + 1)
        taken = logits.ndim
    if taken >= logits.ndim and places[-1] != slice(None):
        return None
    return logits.of_hidden(logits.hidden[tuple(places)], lambda whole: whole[tuple(places)])


_MASKS = (torch.bool, torch.uint8)


def _cross_entropy(func: Callable, args: tuple, kwargs: dict) -> Tensor | None:
    """In tiles, if it is a mean or a sum over tokens of one class each."""
    given = inspect.signature(F.cross_entropy).bind(*args, **kwargs)
    given.apply_defaults()
    logits, targets, weight, size_average, ignored, reduce, reduction, smoothing = given.args
    if not isinstance(logits, PendingLogits) or isinstance(targets, PendingLogits) or logits.ndim != 2 or targets.ndim != 1:
        return None
    if targets.is_floating_point() or reduction not in ("mean", "sum") or not (weight is size_average is reduce is None):
        return None
    logits.require_unchanged()
    if len(logits) != len(targets):
        raise ValueError(f"cross_entropy got {len(targets)} labels for the logits of {len(logits)} tokens")
    tiles = Tiles(logits.head, logits.steps_of_tiles(), logits.hidden, logits.dtype, logits.requires_grad)
    rows = max(logits.most // max(logits.shape[1], 1), 1)
    return tiles.loss(targets.to(logits.device), rows, ignored, smoothing, mean=reduction == "mean")


_RULES: dict[str, Callable[[Callable, tuple, dict], Any]] = {
    **dict.fromkeys(("float", "double", "half", "bfloat16", "to", "tanh", "neg", "clamp"), _each_logit),
    **dict.fromkeys(("mul", "__mul__", "__rmul__", "multiply", "div", "__truediv__", "true_divide"), _each_logit),
    **dict.fromkeys(("add", "__add__", "__radd__", "sub", "__sub__"), _each_logit),
    **dict.fromkeys(("view", "reshape"), _reshaped),
    "contiguous": _same,
    "flatten": _flattened,
    "__getitem__": _chosen,
    "cross_entropy": _cross_entropy,
}
"""What is done by the name of a function of torch. It returns None where it cannot wait for the logits."""
