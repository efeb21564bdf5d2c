"""A loss that is a sum over tiles, whose gradients are computed tile by tile in the forward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten

from holotrain.reversible.context import has_no_data
from holotrain.reversible.replaced_forward import forward_replaced


def base_of(module: nn.Module) -> Any:
    """What gives the hidden states of a model: its base, or, in an OPT, the decoder in it."""
    base = getattr(module, getattr(module, "base_model_prefix", None) or "-", None)
    if isinstance(base, nn.Module) and base is not module and len(children := [*base.children()]) == 1:
        return children[0]
    return base if isinstance(base, nn.Module) else None


class CutBase:
    """The base of a model in a context in which it runs once. Each call gives what it returned, cut to some of the tokens.

    Attributes:
        called: whether it was.
        result: what it returned.
        outputs: the same, flat.
        leaves: the pieces of the last call, with gradients of their own, by their place in ``outputs``.
    """

    def __init__(self, model: nn.Module, tokens: int) -> None:
        self.module, self.tokens = base_of(model), tokens
        self._own = self.module.forward
        self.called, self.result = False, None
        self.outputs: list[Any] = []
        self.leaves: dict[int, Tensor] = {}
        self._cut: slice | None = None

    def replaced(self) -> AbstractContextManager:
        """The context."""
        return forward_replaced(self.module, self._forward)

    @property
    def first(self) -> Tensor:
        return next(iter(self.leaves.values()))

    def run_on(self, tokens: slice | None, run: Callable[[], Any]) -> Any:
        """What a call of the model returns for some of the tokens; None: for all, as the model does without tiles."""
        self._cut = tokens
        return run()

    def of_tokens(self, value: Tensor) -> bool:
        return value.ndim > 1 and value.shape[1] == self.tokens

    def _forward(self, *arguments: Any, **keywords: Any) -> Any:
        self.called = True
        if not self.outputs:
            self.result = self._own(*arguments, **keywords)
            self.outputs, self._structure = tree_flatten(self.result)
        if self._cut is None:
            return self.result
        pieces, self.leaves = list(self.outputs), {}
        for place, value in enumerate(self.outputs):
            if isinstance(value, Tensor):
                piece = value[:, self._cut] if self.of_tokens(value) else value
                if value.is_floating_point():  # also where the base is frozen
                    piece = self.leaves[place] = piece.detach().requires_grad_()
                pieces[place] = piece
        return tree_unflatten(pieces, self._structure)


class SumsOverTiles:
    """The sums of a loss and of its gradients over tiles: for what the base has given, and for the parameters behind it.

    Args:
        base: what gives the hidden states, cut to the tokens of a tile.
    """

    def __init__(self, model: Any, base: CutBase) -> None:
        self._base, self._head = base, _Head.of(model.get_output_embeddings())
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._sums: dict[Tensor, Tensor] = {}
        self._loss: Tensor | None = None

    def head_replaced(self) -> AbstractContextManager:
        """Inside, a head that is one linear layer adds the gradients of its weight to their sum in place."""
        return nullcontext() if self._head is None else forward_replaced(self._head.layer, self._head)

    def add(self, loss: Tensor, tokens: slice) -> None:
        if torch.is_grad_enabled():
            self._differentiate(loss, tokens)
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()

    def _differentiate(self, loss: Tensor, tokens: slice) -> None:
        leaves = self._base.leaves
        with torch.autocast(loss.device.type, enabled=False):
            found = torch.autograd.grad(loss, [*leaves.values(), *self._parameters], allow_unused=True)
        for place, gradient in zip(leaves, found, strict=False):
            value = self._base.outputs[place]
            if gradient is not None and value.requires_grad:
                total = self._sum_of(value, value.dtype)
                (total[:, tokens] if self._base.of_tokens(value) else total).add_(gradient)
        reached = []
        for parameter, gradient in zip(self._parameters, found[len(leaves) :], strict=True):
            if gradient is not None:
                reached.append(parameter)
                self._sum_of(parameter, torch.promote_types(parameter.dtype, torch.float32)).add_(gradient)
        if self._loss is None:
            self._parameters = reached  # others are not looked for in later tiles

    def _sum_of(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        if value not in self._sums:
            self._sums[value] = torch.zeros_like(value, dtype=dtype, requires_grad=False)
        return self._sums[value]

    def loss(self, count: Tensor | int) -> Tensor:
        """The sum over ``count``, with its gradients."""
        assert self._loss is not None
        known = self._sums | ({} if self._head is None else self._head.sums)
        return _KnownGradients.apply(self._loss, self._loss.new_ones(()) / count, [*known.values()], *known)


class _Head:
    """The forward of a linear layer whose weight's gradient is added up in place.

    Attributes:
        sums: its parameters with their gradients so far.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        own = [each for each in layer.parameters() if each.requires_grad and torch.is_grad_enabled()]
        self.sums = {each: torch.zeros_like(each, dtype=torch.promote_types(each.dtype, torch.float32)) for each in own}
        self._cast: dict[torch.dtype, list[Tensor | None]] = {}

    @classmethod
    def of(cls, layer: nn.Module) -> Self | None:
        """None: it is another module, which autograd differentiates."""
        if type(layer) is not nn.Linear or "forward" in vars(layer):
            return None
        if type(layer.weight) is not nn.Parameter and not has_no_data(layer.weight):  # such as a DTensor
            return None
        return cls(layer)

    def __call__(self, x: Tensor) -> Tensor:
        device, dtype = x.device.type, x.dtype
        if torch.is_autocast_enabled(device) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
        if dtype not in self._cast:  # once for all tiles
            own = (self.layer.weight, self.layer.bias)
            self._cast[dtype] = [None if each is None else each.detach().to(dtype) for each in own]
        with torch.autocast(device, enabled=False):
            return _Linear.apply(x.to(dtype), *self._cast[dtype], [*self.sums.values()])


class _Linear(torch.autograd.Function):
    """A linear layer; the gradients of its parameters are added to ``sums``, one for each dimension that a parameter has."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, sums: list[Tensor]) -> Tensor:
        flat = x.flatten(0, -2)
        ctx.save_for_backward(flat, weight)
        ctx.sums = sums
        return F.linear(flat, weight, bias).unflatten(0, x.shape[:-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        flat = gradient.flatten(0, -2)
        for total in ctx.sums:
            if total.ndim == 1:
                total += flat.sum(0, dtype=total.dtype)
            elif total.dtype == flat.dtype:
                total.addmm_(flat.T, x)
            else:
                total += flat.T @ x
        return (flat @ weight).unflatten(0, gradient.shape[:-1]), None, None, None


class _KnownGradients(torch.autograd.Function):
    """``loss * scale``, whose gradients are known but for the scale. In half precision they would underflow with it."""

    @staticmethod
    def forward(ctx, loss: Tensor, scale: Tensor, gradients: list[Tensor], *inputs: Tensor) -> Tensor:
        ctx.gradients, ctx.scale, ctx.dtypes = gradients, scale, [each.dtype for each in inputs]
        return loss * scale

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the gradients of a loss in tiles are given once; a second backward needs a second forward")
        gradients, ctx.gradients = ctx.gradients, None
        scale = gradient * ctx.scale
        scaled = [each.mul_(scale).to(dtype) for each, dtype in zip(gradients, ctx.dtypes, strict=True)]
        return None, None, None, *scaled
