"""The layers of a model that tensor parallelism splits, and the part of them that one rank has.

Shoeybi et al., "Megatron-LM", 2019, section 3: a rank has some of the heads of attention and a part of the hidden layer of an
MLP. The output of each branch is a sum over ranks, and so is the gradient of its input.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from holotrain.models.block_schedules import sequences
from holotrain.models.layers.attention import Attention
from holotrain.models.layers.blocks import MLPBranch
from holotrain.numeric import counted


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
