"""The loss of a language model, a tile of tokens at a time: its logits, the largest tensors of a step, are never whole.

In training the head of a model returns :class:`PendingLogits`. They know the hidden states and what is to be done to each
logit: a scale, a soft-cap, a cast, a bias. Shifts and reshapes of tokens act on the hidden states. Torch's ``cross_entropy``
takes them in tiles. Whatever else reads them gets logits that are computed whole, as without tiles. So nothing has to be known
of the model around them.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from holotrain.reversible import loss_ops
from holotrain.reversible.context import has_no_data
from holotrain.reversible.reads import is_sharded
from holotrain.reversible.replaced_forward import ReplacedForward, forward_replaced
from holotrain.reversible.tiled_cross_entropy import Head, Step, Tiles, Unreadable
from holotrain.reversible.tokenwise import mixes_tokens

IGNORED = -100
"""The label of a token to ignore."""

MOST_LOGITS = {"cuda": 2**27, "cpu": 2**23}
"""Numbers in the logits of a tile, at most."""


def tile_loss(model: nn.Module, most_logits: int | None = None) -> nn.Module:
    """Makes the loss of a language model of transformers tile by tile, in place: ``model(input_ids, labels=labels).loss``.

    Where the loss is torch's ``cross_entropy`` of the logits, each maybe scaled, soft-capped or cast, it is computed in tiles,
    and ``logits`` is None in training with labels. Where anything else reads the logits, they are computed whole, with one
    warning.

    Args:
        model: the model, or one that holds it, as those of peft do.
        most_logits: numbers in the logits of a tile, at most; None: by the device.

    Returns:
        the language model.

    Raises:
        ValueError: there is no such model.
    """
    found = language_model(model)
    if found is None:
        raise ValueError(f"{type(model).__name__} is no language model of transformers, with a head for words")
    untile_loss(found)
    TiledLoss(found).most_logits = most_logits
    return found


def untile_loss(model: nn.Module) -> None:
    """Takes back what :func:`tile_loss` did."""
    TiledLoss.remove_all(model)


def language_model(model: nn.Module) -> Any:
    """The part of a model that has a head for words, as transformers names it; None: there is none."""
    return next((each for each in model.modules() if _head_of(each) is not None), None)


def _head_of(model: nn.Module) -> nn.Module | None:
    get = getattr(type(model), "get_output_embeddings", None)
    return None if get is None else get(model)


class TiledLoss(ReplacedForward):
    """The forward of a language model, which makes its loss tile by tile in training with labels."""

    KEY, WHAT = "_tiled_loss", "model"
    IN_EVAL = False  # an evaluation looks at the logits
    most_logits: int | None
    whole = False
    """The logits reached something that cannot take them as pending."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.said: set[str] = set()

    def train(self, arguments: tuple, keywords: dict[str, Any]) -> Any:
        if keywords.get("labels") is None or self.whole:
            return self.pass_on(arguments, keywords)
        try:
            with pending_logits(self.module, self.most_logits, self.said):
                result = self.own()(*arguments, **keywords)
        except Unreadable as error:
            self.whole = True
            warnings.warn(f"the loss of {type(self.module).__name__} is taken whole: {error}", stacklevel=4)
            return self.pass_on(arguments, keywords)
        return _without_pending(result)


def _without_pending(result: Any) -> Any:
    """What a model returns, with None for logits that nobody has computed."""
    if isinstance(result, dict):
        for name, value in [*result.items()]:
            if isinstance(value, PendingLogits):
                result[name] = value.whole
        return result
    return tree_map_only(PendingLogits, lambda logits: logits.value(), result)


@contextmanager
def pending_logits(model: nn.Module, most_logits: int | None = None, said: set[str] | None = None) -> Generator[None]:
    """Inside, the head of a language model returns :class:`PendingLogits`.

    Args:
        model: as :func:`tile_loss` takes it; one without a head for words stays as it is.
        most_logits: numbers in the logits of a tile, at most; None: by the device.
        said: what was warned of already, so that it is once.
    """
    found = language_model(model)
    head = None if found is None else _head_of(found)
    if head is None or is_sharded(type(head)) or torch.compiler.is_compiling():  # sharded: it would be gathered for each tile
        yield
        return
    own, weights, looking, said = head.forward, _weights_of(head), False, set() if said is None else said

    def forward(hidden: Tensor) -> Tensor:
        nonlocal looking
        if looking or hidden.ndim < 2:
            return own(hidden)
        looking = True
        reason = None if weights else mixes_tokens(head, hidden.reshape(1, -1, hidden.shape[-1]), {})
        looking = False
        return own(hidden) if reason else PendingLogits.of(Head(own, weights, head, said), hidden, most_logits)

    with forward_replaced(head, forward):
        yield


def _weights_of(head: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of a head that is one linear layer and nothing else."""
    if type(head) is not nn.Linear or "forward" in vars(head):
        return None
    plain = type(head.weight) is nn.Parameter or has_no_data(head.weight)  # not such as a DTensor
    return (head.weight, head.bias) if plain else None


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, most_logits: int | None = None
) -> Tensor:
    """The mean cross-entropy of ``hidden @ weight.T + bias`` against ``targets``; NaN if all targets are ignored.

    Under autocast, products are computed in its precision, softmax and sums in fp32. Second derivatives are not supported.

    Args:
        hidden: (N, C).
        weight, bias: (V, C), (V,).
        targets: (N,) of class indices; -100 is ignored.
        most_logits: numbers in the logits of a tile, at most; None: by the device.
    """
    head = Head(partial(F.linear, weight=weight, bias=bias), (weight, bias), None, set())
    logits = PendingLogits.of(head, hidden, most_logits)
    return F.cross_entropy(logits.float() if logits.dtype in loss_ops.HALF else logits, targets)


class PendingLogits(Tensor):
    """Logits that are not computed yet: those of a head and hidden states, with some functions of each of them.

    They know their shape, dtype and device. :func:`torch.nn.functional.cross_entropy` takes them in tiles. Any other function
    gets :meth:`value`, which is computed as it would have been without tiles.

    Attributes:
        hidden: (..., C), with their graph.
        whole: the logits, if they have been computed; else None.
    """

    head: Head
    hidden: Tensor
    steps: tuple[Step, ...]
    most: int
    whole: Tensor | None

    @staticmethod
    def of(head: Head, hidden: Tensor, most: int | None = None, steps: tuple[Step, ...] = ()) -> PendingLogits:
        none = head.forward(hidden.detach().reshape(-1, hidden.shape[-1])[:0])
        for step in steps:
            none = step(none)
        learns = torch.is_grad_enabled() and (none.requires_grad or hidden.requires_grad)
        pending = Tensor._make_wrapper_subclass(
            PendingLogits, (*hidden.shape[:-1], none.shape[-1]), dtype=none.dtype, device=hidden.device, requires_grad=learns
        )
        pending.head, pending.hidden, pending.steps, pending.whole = head, hidden, steps, None
        pending.most = most or MOST_LOGITS.get(hidden.device.type, 2**27)
        return pending

    def then(self, step: Step) -> PendingLogits:
        return PendingLogits.of(self.head, self.hidden, self.most, (*self.steps, step))

    def of_hidden(self, hidden: Tensor) -> PendingLogits:
        return PendingLogits.of(self.head, hidden, self.most, self.steps)

    def value(self) -> Tensor:
        """The logits, with their graph."""
        if self.whole is None:
            whole = self.head.forward(self.hidden)
            for step in self.steps:
                whole = step(whole)
            self.whole = whole
        return self.whole

    def steps_of_tiles(self) -> tuple[Step, ...]:
        """The steps without a last one from half precision to fp32, in which the loss of a tile is computed anyway."""
        if self.dtype != torch.float32 or not self.steps or self.steps[-1].name not in ("float", "to"):
            return self.steps
        before = PendingLogits.of(self.head, self.hidden, self.most, self.steps[:-1])
        return before.steps if before.dtype in loss_ops.HALF else self.steps

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        with torch._C.DisableTorchFunctionSubclass():
            if name in _OF_SHAPE:
                return func(*args, **kwargs)
            pending = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, PendingLogits))
            if pending.requires_grad and not torch.is_grad_enabled():  # maybe within a Function with a backward of its own
                raise Unreadable(f"{name} reads its logits without gradients")
            rule = _RULES.get(name)
            done = None if rule is None else rule(func, args, kwargs)
            if done is not None:
                return done
            if (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or "out" in kwargs:
                raise Unreadable(f"{name} changes its logits")
            pending.warn(name)
            args, kwargs = tree_map_only(PendingLogits, PendingLogits.value, (args, kwargs))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # ty: ignore[incompatible-method-override]
        raise Unreadable(f"{func} reads its logits outside of torch's functions")

    def warn(self, name: str) -> None:
        if not self.head.said:
            self.head.said.add(name)
            warnings.warn(f"the logits are computed whole, since {name} reads them", stacklevel=4)


_OF_SHAPE = {"__get__", "size", "dim", "ndimension", "numel", "is_floating_point", "is_complex", "__len__", "get_device"}
"""Functions that ask for no number. ``__get__`` is that of properties, such as ``shape``; others of those raise."""


def _each_logit(func: Callable, args: tuple, kwargs: dict) -> PendingLogits | None:
    """A function of each logit by itself, maybe with a number or a tensor that has one entry or one for each word."""
    pending = [each for each in args if isinstance(each, PendingLogits)]
    if len(pending) != 1 or any(isinstance(each, Tensor) for each in kwargs.values()):
        return None
    logits, own = pending[0], []
    for each in args:
        if each is logits:
            own.append(None)
        elif isinstance(each, Tensor):
            if each.numel() not in (1, each.shape[-1] if each.ndim else 1) or each.numel() not in (1, logits.shape[-1]):
                return None
            own.append(each.reshape(-1) if each.ndim > 1 else each)
        else:
            own.append(each)
    return logits.then(Step(func, tuple(own), kwargs))


def _same(func: Callable, args: tuple, kwargs: dict) -> PendingLogits:
    return args[0]


def _reshaped(func: Callable, args: tuple, kwargs: dict) -> PendingLogits | None:
    logits, *sizes = args
    sizes = list(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes
    if kwargs or not isinstance(logits, PendingLogits) or not sizes or sizes[-1] != logits.shape[-1]:
        return None
    rest = logits.hidden.shape[:-1].numel()
    known = math.prod(size for size in sizes[:-1] if size != -1)
    sizes = [rest // max(known, 1) if size == -1 else size for size in sizes[:-1]]
    return logits.of_hidden(logits.hidden.reshape(*sizes, logits.hidden.shape[-1]))


def _flattened(func: Callable, args: tuple, kwargs: dict) -> PendingLogits | None:
    logits, start, end = (*args, *[kwargs.get(name, default) for name, default in _ENDS[len(args) - 1 :]])
    if end % logits.ndim == logits.ndim - 1:
        return None
    return logits.of_hidden(logits.hidden.flatten(start % logits.ndim, end % logits.ndim))


_ENDS = [("start_dim", 0), ("end_dim", -1)]


def _chosen(func: Callable, args: tuple, kwargs: dict) -> PendingLogits | None:
    """Some tokens: an index that leaves the words as they are."""
    logits, index = args
    if not isinstance(logits, PendingLogits):
        return None
    places = list(index) if isinstance(index, tuple) else [index]
    masks = [place for place in places if isinstance(place, Tensor) and place.dtype == torch.bool]
    taken = sum(place is not None for place in places) + sum(mask.ndim - 1 for mask in masks)
    to_the_end = taken >= logits.ndim or any(place is Ellipsis for place in places)
    if to_the_end and not (isinstance(places[-1], slice) and places[-1] == slice(None)) and places[-1] is not Ellipsis:
        return None
    return logits.of_hidden(logits.hidden[index])


def _cross_entropy(func: Callable, args: tuple, kwargs: dict) -> Tensor | None:
    """In tiles, if it is a mean or a sum over tokens of one class each."""
    given = inspect.signature(F.cross_entropy).bind(*args, **kwargs)
    given.apply_defaults()
    logits, targets, weight, size_average, ignored, reduce, reduction, smoothing = given.args
    if not isinstance(logits, PendingLogits) or isinstance(targets, PendingLogits) or logits.ndim != 2 or targets.ndim != 1:
        return None
    if targets.is_floating_point() or reduction not in ("mean", "sum") or not (weight is size_average is reduce is None):
        return None
    if len(logits) != len(targets):
        raise ValueError(f"cross_entropy got {len(targets)} labels for the logits of {len(logits)} tokens")
    tiles = Tiles(logits.head, logits.steps_of_tiles(), logits.hidden, logits.dtype, logits.requires_grad)
    rows = max(logits.most // max(logits.shape[1], 1), 1)
    return tiles.loss(targets.to(logits.device), rows, ignored, smoothing, mean=reduction == "mean")


_RULES: dict[str, Callable[[Callable, tuple, dict], Any]] = {
    **dict.fromkeys(("float", "double", "half", "bfloat16", "to", "type", "tanh", "neg", "clamp"), _each_logit),
    **dict.fromkeys(("mul", "__mul__", "__rmul__", "multiply", "div", "__truediv__", "true_divide"), _each_logit),
    **dict.fromkeys(("add", "__add__", "__radd__", "sub", "__sub__"), _each_logit),
    **dict.fromkeys(("view", "reshape"), _reshaped),
    "contiguous": _same,
    "flatten": _flattened,
    "__getitem__": _chosen,
    "cross_entropy": _cross_entropy,
}
"""What is done by the name of a function of torch. It returns None where it cannot wait for the logits."""
