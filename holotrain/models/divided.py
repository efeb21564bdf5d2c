"""A model as one rank of tensor parallelism has it, and the sums over ranks that it takes part in.

Shoeybi et al., "Megatron-LM", 2019, section 3: of attention a rank has some of the heads, of an MLP some of the hidden layer;
a sum over ranks ends each branch, and in the backward each branch's input gradient is one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holotrain.models.division import division
from holotrain.models.layers.attention import Attention
from holotrain.overlap import Job
from holotrain.overlap.groups import ALL_REDUCE


@dataclass
class Sums:
    """The products whose results are summed over ranks, in the order in which they were computed.

    Args:
        whole: why other layers are computed whole by every rank, a phrase each.
    """

    ranks: int
    whole: list[str] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)

    def note(self, rows: Tensor, inputs: int, outputs: int, covered: bool) -> None:
        """
        Args:
            rows: (..., any), what is summed or what that is computed from: it gives rows, dtype and device.
            inputs, outputs: features of the product.
            covered: the weight's gradient follows.
        """
        count = rows.numel() // rows.shape[-1]
        self.jobs.append(Job(count, inputs, outputs, ALL_REDUCE, self.ranks, rows.dtype, torch.device("cpu"), covered))


def divide(model: nn.Module, ranks: int) -> Sums:
    """Replaces what can be shared out by one rank's part of it, in place; nothing is sent, but noted.

    Returns:
        filled while the model runs, forward and backward.

    Raises:
        Indivisible: nothing can be shared out.
    """
    found = division(model, ranks)
    sums = Sums(ranks, found.whole)
    for layer in found.layers:
        if isinstance(layer, Attention):
            layer.heads //= ranks
            width = layer.project.in_features // ranks
            layer.qkv = _Columns(layer.qkv, 3 * width, sums)
            layer.project = _Rows(layer.project, width, sums)
        else:
            width = layer.widen.out_features // ranks
            layer.widen = _Columns(layer.widen, width, sums)
            layer.narrow = _Rows(layer.narrow, width, sums)
    return sums


class _Columns(nn.Linear):
    """Some of a Linear's outputs: the gradient of its input is a summand."""

    def __init__(self, whole: nn.Linear, outputs: int, sums: Sums) -> None:
        super().__init__(whole.in_features, outputs, whole.bias is not None, device=whole.weight.device)
        _trained_as(self, whole)
        self.sums = sums

    def forward(self, x: Tensor) -> Tensor:
        # In the precision of the product, as the overlapped layers send it.
        if torch.is_autocast_enabled(x.device.type) and x.dtype == torch.float32:
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return F.linear(_NoteGradient.apply(x, self.out_features, self.sums), self.weight, self.bias)


class _Rows(nn.Linear):
    """Some of a Linear's inputs: its output is a summand."""

    def __init__(self, whole: nn.Linear, inputs: int, sums: Sums) -> None:
        super().__init__(inputs, whole.out_features, whole.bias is not None, device=whole.weight.device)
        _trained_as(self, whole)
        self.sums = sums

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.sums.note(y, self.in_features, self.out_features, covered=False)
        return y


class _NoteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, outputs: int, sums: Sums) -> Tensor:
        ctx.outputs, ctx.sums = outputs, sums
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.sums.note(grad, ctx.outputs, grad.shape[-1], covered=True)
        return grad, None, None


def _trained_as(part: nn.Linear, whole: nn.Linear) -> None:
    for own, of_whole in zip(part.parameters(), whole.parameters(), strict=True):
        own.requires_grad_(of_whole.requires_grad)
