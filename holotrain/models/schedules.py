"""The sequences of blocks in a model, and the backward schedule of each block."""

from collections.abc import Sequence

from torch import nn

from holotrain.models.layers.residual import ResidualSequence
from holotrain.reversible import ReversibleSequence


def sequences(model: nn.Module) -> list[ReversibleSequence | ResidualSequence]:
    """The model's sequences of blocks, first to last; not those inside a block of another sequence."""
    found: list[ReversibleSequence | ResidualSequence] = []
    within: set[int] = set()
    for module in model.modules():
        if isinstance(module, ReversibleSequence | ResidualSequence) and id(module) not in within:
            found.append(module)
            within |= {id(part) for part in module.modules()}
    return found


def schedule_blocks(model: nn.Module, schedules: Sequence[str]) -> None:
    """Sets the schedule of every block.

    Args:
        schedules: one for each block, over all sequences, first to last.

    Raises:
        ValueError: the number of schedules is not that of the blocks, or a block cannot have its schedule.
    """
    runs = sequences(model)
    depth = sum(len(run.blocks) for run in runs)
    if len(schedules) != depth:
        raise ValueError(f"there are {len(schedules)} schedules for {depth} blocks")
    start = 0
    for run in runs:
        run.backward = list(schedules[start : start + len(run.blocks)])
        start += len(run.blocks)
