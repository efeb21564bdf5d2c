"""The backward schedules by name: which activations blocks store, and which they recompute in the backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from holotrain.reversible.block import ReversibleBlock
from holotrain.reversible.grid import Grid
from holotrain.reversible.kept import Keeper
from holotrain.reversible.ranges import in_trace

SCHEDULES = ("autograd", "checkpoint", "reversible", "pareprop")
"""Store everything; store the streams between blocks; rebuild the streams; rebuild them in parallel with the gradients."""


@dataclass(frozen=True)
class Schedule:
    """The schedule of one block: its name, and the results that a recomputed block keeps."""

    name: str
    keep: tuple[str, ...] = ()

    @classmethod
    def parse(cls, words: str) -> Schedule:
        """
        Args:
            words: a name, followed by the results to keep, separated by plus signs: ``"reversible+attention"``.

        Raises:
            ValueError: an unknown schedule, or one that cannot keep results.
        """
        name, *keep = words.split("+")
        if name not in SCHEDULES:
            raise ValueError(f"backward must be one of {', '.join(SCHEDULES)}, not {name!r}")
        if keep:
            if name not in ("reversible", "pareprop"):
                raise ValueError(f"backward={words!r}: {name} cannot keep results; reversible and pareprop can")
            Keeper(keep)
        return cls(name, tuple(keep))


STORING = Schedule("autograd")


def schedules_of(backward: str | Sequence[str], depth: int) -> list[Schedule]:
    """The schedule of each block.

    Args:
        backward: one schedule for all blocks, or one per block.

    Raises:
        ValueError: an unknown schedule, or a wrong number of schedules.
    """
    if isinstance(backward, str):
        return [Schedule.parse(backward)] * depth
    if len(backward) != depth:
        raise ValueError(f"backward lists {len(backward)} schedules for {depth} blocks")
    return [Schedule.parse(words) for words in backward]


def stores_everything(backward: str | Sequence[str]) -> bool:
    """Whether all blocks store all activations."""
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
    """Plain autograd, which stores every activation. It is the reference, and it runs the blocks without gradients.

    ``first`` is the number of the first block, for traces.
    """
    for number, block in enumerate(blocks, first):
        with in_trace("forward", number):
            x1, x2 = block(x1, x2, f_kwargs, g_kwargs, grid=grid)
    return x1, x2
