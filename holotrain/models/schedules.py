"""The sequences of blocks in a model, and the schedule of each block's backward."""

from collections.abc import Sequence

from torch import nn

from holotrain.models.layers.residual import ResidualSequence
from holotrain.reversible import ReversibleSequence


def sequences(model: nn.Module) -> list[ReversibleSequence | ResidualSequence]:
    """The model's runs of blocks, first to last; not those within a block of another."""
    found: list[ReversibleSequence | ResidualSequence] = []
    within: set[int] = set()
    for module in model.modules():
        if isinstance(module, ReversibleSequence | ResidualSequence) and id(module) not in within:
            found.append(module)
            within |= {id(part) for part in module.modules()}
    return found


def schedule_blocks(model: nn.Module, schedules: Sequence[str]) -> None:
    """Gives every block a schedule of its own.

    Args:
        schedules: one a block, through all sequences, first to last.

    Raises:
        ValueError: not as many as there are blocks, or one that such blocks cannot have.
    """
    runs = sequences(model)
    depth = sum(len(run.blocks) for run in runs)
    if len(schedules) != depth:
        raise ValueError(f"there are {len(schedules)} schedules for {depth} blocks")
    start = 0
    for run in runs:
        run.backward = list(schedules[start : start + len(run.blocks)])
        start += len(run.blocks)
