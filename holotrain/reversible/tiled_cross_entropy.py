"""The cross-entropy of logits that a head makes of hidden states, a tile of tokens at a time.

The gradients of a tile are made at once, in the forward, and nothing of it stays (Liger Kernel, arXiv 2410.10989). On CUDA one
kernel makes loss and gradients (:mod:`holotrain.reversible.loss_ops`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from holotrain.reversible import loss_ops
from holotrain.reversible.context import has_no_data


class Unreadable(RuntimeError):
    """Pending logits reached code that needs their numbers and cannot be given them."""


class Head(NamedTuple):
    """What makes logits of hidden states: (..., C) -> (..., V).

    Attributes:
        own: its forward.
        weights: weight and bias, if it is one linear layer and nothing else.
        module: whose parameters it reads; None: it reads the weights alone.
        autocast: the dtype to which autocast casts in its call; None: it does not cast.
    """

    own: Callable[[Tensor], Tensor]
    weights: tuple[Tensor, Tensor | None] | None
    module: nn.Module | None
    autocast: torch.dtype | None

    @classmethod
    def called_now(
        cls,
        own: Callable[[Tensor], Tensor],
        weights: tuple[Tensor, Tensor | None] | None,
        module: nn.Module | None,
        device: torch.device,
    ) -> Head:
        autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        return cls(own, weights, module, autocast)

    def as_called(self, device: torch.device) -> torch.autocast:
        """The context of its call."""
        return torch.autocast(device.type, self.autocast, self.autocast is not None)

    def forward(self, hidden: Tensor) -> Tensor:
        with self.as_called(hidden.device):
            return self.own(hidden)


LOGITS = object()
"""Stands for the logits among the arguments of a step."""


class Step(NamedTuple):
    """A function of each logit: that of torch, and its arguments, with ``LOGITS`` in place of the logits of dtype ``given``."""

    function: Callable
    args: tuple
    keywords: dict
    given: torch.dtype

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", "")

    def __call__(self, logits: Tensor, leaves: Mapping[Tensor, Tensor] = MappingProxyType({})) -> Tensor:
        """``leaves``: what stands in place of tensors among the arguments."""
        args = [leaves.get(each, each) if isinstance(each, Tensor) else each for each in self.args]
        return self.function(*(logits if each is LOGITS else each for each in args), **self.keywords)


class Tiles:
    """The cross-entropy of logits, tile by tile, with the sums of its gradients.

    The gradients are those of a sum: those of a mean would underflow in half precision.

    Args:
        head, steps: what makes logits of hidden states.
        hidden: (N, C), with their graph.
        dtype: of the logits.
        learns: whether gradients are wanted.
    """

    def __init__(self, head: Head, steps: Sequence[Step], hidden: Tensor, dtype: torch.dtype, learns: bool) -> None:
        self._steps, self._hidden, self._learns = steps, hidden, learns
        self._dtype = _for_sums(dtype) if torch.is_autocast_enabled(hidden.device.type) else dtype
        self._head, self._linear = head, LinearHead(*head.weights) if head.weights else None
        # What tiles read beside their tokens, and the leaf that stands for it in a tile.
        leaves: dict[Tensor, Tensor] = (
            {} if head.module is None or self._linear else {each: each for each in head.module.parameters()}
        )
        for step in steps:
            read = [each for each in step.args if isinstance(each, Tensor) and each.requires_grad]
            leaves |= {each: each.detach().requires_grad_() for each in read}
        self._leaves = {each: leaf for each, leaf in leaves.items() if each.requires_grad} if learns else {}
        self._sums = {each: _zeros(each) for each in self._leaves}
        self._gradient = torch.zeros_like(hidden) if learns and hidden.requires_grad else None

    def loss(self, targets: Tensor, rows: int, ignored: int, smoothing: float, mean: bool) -> Tensor:
        """The sum of all tiles, or their mean: NaN, with gradients of zero, where all targets are ignored.

        Args:
            targets: (N,) of class indices.
            rows: tokens of a tile.
            ignored, smoothing: ``ignore_index`` and ``label_smoothing`` of torch's cross-entropy.
        """
        starts = list(range(0, len(targets), rows))
        if has_no_data(self._hidden):  # a plan runs a few tiles; the others need no more memory
            starts = [*starts[:2], *starts[2:][-1:]]
        total = self._hidden.new_zeros((), dtype=_for_sums(self._dtype))
        for start in starts:
            tile = slice(start, start + rows)
            total = total + self._add_tile(tile, targets[tile], ignored, smoothing)
        count = (targets != ignored).sum() if mean else total.new_ones(())
        sums = self._sums | (self._linear.sums if self._linear else {})
        if self._gradient is not None:
            sums[self._hidden] = self._gradient
        return KnownGradients.apply(total, count, [*sums.values()], *sums).to(self._dtype)

    def _add_tile(self, rows: slice, targets: Tensor, ignored: int, smoothing: float) -> Tensor:
        """Adds the gradients of a tile to their sums, and returns its loss."""
        hidden = self._hidden[rows].detach().requires_grad_(self._learns)  # also where the base is frozen
        with self._head.as_called(hidden.device):
            logits = (self._linear or self._head.own)(hidden)
        for step in self._steps:
            logits = step(logits, self._leaves)
        if (
            self._learns
            and loss_ops.is_fused(logits)
            and (not self._linear or (self._steps and self._steps[-1].name == "tanh"))
        ):
            logits = logits.clone()  # the kernel writes over them, and what made them may have saved them
        loss = _summed_loss(logits, targets, ignored, smoothing)
        del logits  # which the gradients do not need
        if self._learns:
            self._differentiate(loss, hidden, rows)
        return loss.detach()

    def _differentiate(self, loss: Tensor, hidden: Tensor, rows: slice) -> None:
        if self._linear is None:
            require_leaves(loss, [hidden, *self._leaves.values()])
        with torch.autocast(loss.device.type, enabled=False):
            of_hidden, *found = torch.autograd.grad(loss, [hidden, *self._leaves.values()], allow_unused=True)
        if self._gradient is not None:
            self._gradient[rows] = of_hidden
        for total, gradient in zip(self._sums.values(), found, strict=True):
            if gradient is not None:
                total += gradient


def _summed_loss(logits: Tensor, targets: Tensor, ignored: int, smoothing: float) -> Tensor:
    if smoothing == 0 and loss_ops.is_fused(logits):
        return loss_ops.summed_cross_entropy(logits, targets, ignored)
    logits = logits.to(_for_sums(logits.dtype))
    return F.cross_entropy(logits, targets, reduction="sum", ignore_index=ignored, label_smoothing=smoothing)


def _for_sums(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=_for_sums(like.dtype), requires_grad=False)


def require_leaves(loss: Tensor, known: list[Tensor]) -> None:
    """Raises a RuntimeError if a loss has gradients for leaves that are not known."""
    for leaf in leaves_of(loss):
        if all(leaf is not each for each in known):
            raise Unreadable("its head reads a tensor that is none of its parameters")


def leaves_of(loss: Tensor) -> list[Tensor]:
    """The leaves for which a loss has gradients."""
    nodes, seen, leaves = [loss.grad_fn], set(), []
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.append(leaf)
        nodes += [following for following, _ in node.next_functions]
    return leaves


class LinearHead:
    """A linear layer (N, C) -> (N, V), whose parameters' gradients are added up in place.

    Attributes:
        sums: the weights that learn, with the sums of their gradients.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._own = (weight, bias)
        learns = [each for each in self._own if each is not None and each.requires_grad and torch.is_grad_enabled()]
        self.sums = {each: _zeros(each) for each in learns}
        self._cast: dict[torch.dtype, list[Tensor | None]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        device, dtype = x.device.type, x.dtype
        if torch.is_autocast_enabled(device) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
        if dtype not in self._cast:  # once for all tiles
            self._cast[dtype] = [None if each is None else each.detach().to(dtype) for each in self._own]
        with torch.autocast(device, enabled=False):
            return _Linear.apply(x.to(dtype), *self._cast[dtype], [*self.sums.values()])


class _Linear(torch.autograd.Function):
    """A linear layer; the gradients of its parameters are added to ``sums``, one for each dimension that a parameter has."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, sums: list[Tensor]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sums = sums
        return F.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for total in ctx.sums:
            if total.ndim == 1:
                total += gradient.sum(0, dtype=total.dtype)
            else:
                loss_ops.add_product(total, gradient.T, x)
        return gradient @ weight, None, None, None


class KnownGradients(torch.autograd.Function):
    """``total / count``, whose gradients are known but for the factor. In half precision they would underflow with it."""

    @staticmethod
    def forward(ctx, total: Tensor, count: Tensor, gradients: list[Tensor], *inputs: Tensor) -> Tensor:
        ctx.gradients, ctx.count, ctx.dtypes = gradients, count, [each.dtype for each in inputs]
        return total / count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the gradients of this loss are given once; a second backward needs a second forward")
        gradients, ctx.gradients = ctx.gradients, None
        factor = torch.where(ctx.count == 0, 0, gradient / ctx.count)  # no label at all: zeros, as without tiles
        found, nodes = [], [node for node, _ in ctx.next_functions[2:]]
        for dtype, node in zip(ctx.dtypes, nodes, strict=True):
            gradient = gradients.pop(0).mul_(factor)
            found.append(None if _added_to_leaf(node, gradient) else gradient.to(dtype))
        return None, None, None, *found


def _added_to_leaf(node: Any, gradient: Tensor) -> bool:
    """Adds a gradient to the ``.grad`` of a leaf at once, if autograd would. It would keep it until the leaf's last gradient
    has come: at the end of the backward, if the weight of the head is that of the embedding, with a copy for their sum.

    Args:
        node: to which the gradient belongs.
    """
    leaf = getattr(node, "variable", None)
    if leaf is None or is_traceable_wrapper_subclass(leaf) or leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
        return False
    try:
        accumulates = torch._C._will_engine_execute_node(node)  # private: no public function tells
    except RuntimeError:  # in torch.autograd.grad, which returns it
        return False
    if not accumulates or (leaf.grad is not None and leaf.grad.layout != torch.strided):
        return False
    if leaf.grad is None:
        leaf.grad = gradient.to(leaf.dtype)
    else:
        leaf.grad += gradient
    return True
