"""The layers of a model that tensor parallelism splits, and the part of them that one rank has.

Shoeybi et al., "Megatron-LM", 2019, section 3: a rank has some of the heads of attention and a part of the hidden layer of an
MLP. The output of each branch is a sum over ranks, and so is the gradient of its input.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holotrain.models.block_schedules import sequences
from holotrain.models.layers.attention import Attention
from holotrain.models.layers.blocks import MLPBranch
from holotrain.numeric import counted
from holotrain.overlap import Job
from holotrain.overlap.groups import ALL_REDUCE


class TensorParallelError(ValueError):
    """No layer of the model can be split among that number of processes."""


@dataclass(frozen=True)
class Division:
    """
    Args:
        layers: that are split: attention by its heads, an MLP by its hidden width.
        whole: a phrase for each kind of layer that every process computes whole, saying why.
    """

    layers: list[Attention | MLPBranch]
    whole: list[str]


def division(model: nn.Module, ranks: int) -> Division:
    """
    Args:
        ranks: number of tensor parallel processes.

    Raises:
        TensorParallelError: no layer can be split; says why.
    """
    layers: list[Attention | MLPBranch] = []
    whole: dict[str, None] = {}  # a set, in order
    for block in (block for sequence in sequences(model) for block in sequence.blocks):
        if not any(isinstance(part, Attention) for part in block.modules()):
            whole["attention in windows, or pooled"] = None
    for part in model.modules():
        if not isinstance(part, Attention | MLPBranch):
            continue
        count = part.heads if isinstance(part, Attention) else part.widen.out_features
        if count % ranks == 0:
            layers.append(part)
        else:
            named = counted(count, "head") if isinstance(part, Attention) else f"MLPs of width {count}"
            whole[f"{named} (not divisible by {ranks})"] = None
    if not layers:
        raise TensorParallelError("; ".join(whole) or "it has no such layers")
    return Division(layers, list(whole))


@dataclass
class AllReduceLog:
    """The products whose results are summed over ranks, in the order in which they were computed.

    Args:
        whole: a phrase for each kind of layer that every rank computes whole, saying why.
    """

    ranks: int
    whole: list[str] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)

    def note(self, rows: Tensor, inputs: int, outputs: int, covered: bool) -> None:
        """
        Args:
            rows: (..., any), the result of the product or its input, which gives number of rows and dtype.
            inputs, outputs: features of the product.
            covered: whether the weight's gradient is computed next.
        """
        count = rows.numel() // rows.shape[-1]
        self.jobs.append(Job(count, inputs, outputs, ALL_REDUCE, self.ranks, rows.dtype, torch.device("cpu"), covered))


def divide(model: nn.Module, ranks: int) -> AllReduceLog:
    """Replaces layers that can be split by one rank's part of them, in place. Sums over ranks are not computed, only recorded.

    Returns:
        the record, which is filled while the model runs forward and backward.

    Raises:
        TensorParallelError: no layer can be split.
    """
    found = division(model, ranks)
    all_reduces = AllReduceLog(ranks, found.whole)
    for layer in found.layers:
        if isinstance(layer, Attention):
            layer.query_key_value = _Columns(layer.query_key_value, all_reduces, outputs=ranks)
            layer.project = _Rows(layer.project, all_reduces, inputs=ranks)
        else:
            layer.widen = _Columns(layer.widen, all_reduces, outputs=ranks)
            layer.narrow = _Rows(layer.narrow, all_reduces, inputs=ranks)
    return all_reduces


class _Part(nn.Linear):
    """A part of a Linear, trained if it is: ``1 / inputs`` of its inputs and ``1 / outputs`` of its outputs."""

    def __init__(self, whole: nn.Linear, all_reduces: AllReduceLog, inputs: int = 1, outputs: int = 1) -> None:
        sizes = whole.in_features // inputs, whole.out_features // outputs
        super().__init__(*sizes, whole.bias is not None, whole.weight.device, whole.weight.dtype)
        for own, of_whole in zip(self.parameters(), whole.parameters(), strict=True):
            own.requires_grad_(of_whole.requires_grad)
        self.all_reduces = all_reduces


class _Columns(_Part):
    """Some of a Linear's outputs; the gradient of its input is one term of a sum over ranks."""

    def forward(self, input: Tensor) -> Tensor:
        x = input
        # In the precision of the product, in which the overlapped layers send it.
        if torch.is_autocast_enabled(x.device.type) and x.dtype == torch.float32:
            x = x.to(torch.get_autocast_dtype(x.device.type))
        x = x.view_as(x)  # whose gradient is that of this product alone
        if x.requires_grad:
            x.register_hook(lambda grad: self.all_reduces.note(grad, self.out_features, grad.shape[-1], covered=True))
        return F.linear(x, self.weight, self.bias)


class _Rows(_Part):
    """Some of a Linear's inputs; its output is one term of a sum over ranks."""

    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        self.all_reduces.note(y, self.in_features, self.out_features, covered=False)
        return y
