"""The backward schedules by name: how a run of blocks comes by its activations when gradients are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from holotrain.reversible.block import ReversibleBlock
from holotrain.reversible.grid import Grid
from holotrain.reversible.kept import Keeper
from holotrain.reversible.ranges import in_trace

SCHEDULES = ("autograd", "checkpoint", "reversible", "pareprop")
"""Store everything; store the streams between blocks; rebuild the streams in turn; rebuild them while differentiating."""


@dataclass(frozen=True)
class Schedule:
    """That of one block: its name, and what the block keeps where it is recomputed."""

    name: str
    keep: tuple[str, ...] = ()

    @classmethod
    def parse(cls, words: str) -> Schedule:
        """
        Args:
            words: a name, and after plus signs what is kept: ``"reversible+attention"``.

        Raises:
            ValueError: there is no such schedule, or it has no use for what it shall keep.
        """
        name, *keep = words.split("+")
        if name not in SCHEDULES:
            raise ValueError(f"backward must be one of {', '.join(SCHEDULES)}, not {name!r}")
        if keep:
            if name not in ("reversible", "pareprop"):
                raise ValueError(f"backward={words!r}: {name} has no use for what is kept; reversible and pareprop have")
            Keeper(keep)
        return cls(name, tuple(keep))


STORING = Schedule("autograd")


def schedules_of(backward: str | Sequence[str], depth: int) -> list[Schedule]:
    """The schedule of each block.

    Args:
        backward: one for all, or one a block.

    Raises:
        ValueError: an unknown one, or not one for each block.
    """
    if isinstance(backward, str):
        return [Schedule.parse(backward)] * depth
    if len(backward) != depth:
        raise ValueError(f"backward names {len(backward)} schedules for {depth} blocks")
    return [Schedule.parse(words) for words in backward]


def stores_everything(backward: str | Sequence[str]) -> bool:
    """Whether no block is recomputed."""
    return set([backward] if isinstance(backward, str) else backward) <= {STORING.name}


def run_storing(
    blocks: Sequence[ReversibleBlock],
    x1: Tensor,
    x2: Tensor,
    f_kwargs: dict,
    g_kwargs: dict,
    grid: Grid | None = None,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """Plain autograd: every activation is stored. The reference, and the path without gradients.

    ``first`` is the number of the first block, for traces.
    """
    for number, block in enumerate(blocks, first):
        with in_trace("forward", number):
            x1, x2 = block(x1, x2, f_kwargs, g_kwargs, grid=grid)
    return x1, x2
