"""The backward schedules by name: how a run of blocks comes by its activations when gradients are computed."""

from collections.abc import Sequence

from torch import Tensor

from holotrain.reversible.block import ReversibleBlock
from holotrain.reversible.grid import Grid

SCHEDULES = ("autograd", "checkpoint", "reversible", "pareprop")
"""Store everything; store the streams between blocks; rebuild the streams in turn; rebuild them while differentiating."""


def run_storing(
    blocks: Sequence[ReversibleBlock], x1: Tensor, x2: Tensor, f_kwargs: dict, g_kwargs: dict, grid: Grid | None = None
) -> tuple[Tensor, Tensor]:
    """Plain autograd: every activation is stored. The reference, and the path without gradients."""
    for block in blocks:
        x1, x2 = block(x1, x2, f_kwargs, g_kwargs, grid=grid)
    return x1, x2
