"""The backward schedules by name: how a run of blocks comes by its activations when gradients are computed."""

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from holotrain.reversible.block import ReversibleBlock
from holotrain.reversible.recompute import run_recomputing

Schedule = Callable[[Sequence[ReversibleBlock], Tensor, Tensor, dict, dict], tuple[Tensor, Tensor]]


def run_storing(
    blocks: Sequence[ReversibleBlock], x1: Tensor, x2: Tensor, f_kwargs: dict, g_kwargs: dict
) -> tuple[Tensor, Tensor]:
    """Plain autograd: every activation is stored. The reference, and the path without gradients."""
    for block in blocks:
        x1, x2 = block(x1, x2, f_kwargs, g_kwargs)
    return x1, x2


def run_checkpointing(
    blocks: Sequence[ReversibleBlock], x1: Tensor, x2: Tensor, f_kwargs: dict, g_kwargs: dict
) -> tuple[Tensor, Tensor]:
    """``torch.utils.checkpoint`` a block: the two streams between blocks are stored, the inside is recomputed."""
    for block in blocks:
        x1, x2 = checkpoint(block, x1, x2, f_kwargs, g_kwargs, use_reentrant=False)
    return x1, x2


SCHEDULES: dict[str, Schedule] = {
    "autograd": run_storing,
    "checkpoint": run_checkpointing,
    "reversible": run_recomputing,
}
