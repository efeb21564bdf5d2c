"""What each block should store, so that a step fits a budget and takes the least time.

Every block has a few ways to come by its activations, dear in memory or dear in time. Which way each takes is a knapsack
problem, solved exactly for memory that adds up; since a real peak is less than that sum (what the last blocks store is free
again when the first are recomputed), the choice is rehearsed and what is left over is given out again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

CELLS = 2000
"""Into how many parts the memory to give out is divided; what a block takes is rounded up to whole ones."""

MARGIN = 0.002
"""Of a budget, left free for small temporaries of operations, which neither the peak nor the bound of a plan includes."""

ROUNDS = 6
"""Rehearsals of a choice, at most, beside those of the smallest and the fastest."""


@dataclass(frozen=True)
class Option:
    """One way in which a block can come by its activations.

    Args:
        name: the schedule, as :class:`~holotrain.reversible.ReversibleSequence` takes it.
        held: bytes that wait for the backward.
        cost: of a forward and a backward, in any unit.
    """

    name: str
    held: int
    cost: float


@dataclass(frozen=True)
class Stage:
    """Blocks in a row that are alike."""

    depth: int
    options: Sequence[Option]


@dataclass(frozen=True)
class Choice:
    """
    Args:
        blocks: the schedule of each block, first to last.
        peak: bytes of the step, rehearsed.
        cost: of all blocks.
        dearest: the cost where every block recomputes as much as it can.
    """

    blocks: list[str]
    peak: int
    cost: float
    dearest: float


class TooSmall(ValueError):
    """Nothing fits the budget; ``least`` would."""

    def __init__(self, least: int) -> None:
        super().__init__(f"no choice takes less than {least} bytes")
        self.least = least


def choose(stages: Sequence[Stage], peak: Callable[[list[str]], int], budget: int) -> Choice:
    """The cheapest choice whose rehearsed peak is within the budget, less a margin; the smallest one may use that too.

    Args:
        peak: bytes of a step, given the schedule of each block.

    Raises:
        TooSmall: not even the least memory is within the budget.
    """
    known: dict[tuple[str, ...], int] = {}

    def rehearsed(chosen: list[list[Option]]) -> int:
        names = tuple(_names(chosen))
        if names not in known:
            known[names] = peak(list(names))
        return known[names]

    least = best = cheapest(stages, 0)
    if rehearsed(least) > budget:
        raise TooSmall(rehearsed(least))
    room = budget * (1 - MARGIN)
    high = 2.0 * sum(stage.depth * max(option.held for option in stage.options) for stage in stages)  # room for everything
    chosen = cheapest(stages, high)
    beyond: list[list[Option]] | None = None
    for _ in range(1 + ROUNDS if rehearsed(least) < room else 0):
        if rehearsed(chosen) <= room:
            best = min(best, chosen, key=_cost)
        else:
            beyond, high = chosen, min(high, _held(chosen) - _held(least))
        if beyond is None:
            break
        # The peak is convex in what is held: a line between what fits and what does not never promises too much.
        share = (room - rehearsed(best)) / (rehearsed(beyond) - rehearsed(best))
        low = _held(best) - _held(least)
        chosen = cheapest(stages, low + (_held(beyond) - _held(best)) * share)
        if _names(chosen) == _names(best):
            chosen = cheapest(stages, (low + high) / 2)
    return Choice(_names(best), rehearsed(best), _cost(best), _cost(least))


def cheapest(stages: Sequence[Stage], spare: float) -> list[list[Option]]:
    """The options of each stage's blocks that cost least in all and hold no more than ``spare`` beyond the least they can.

    Within a stage those that hold most come last: what they hold is free again when the others need room.
    """
    cell = max(spare, 1) / CELLS
    # costs[c]: the least cost of the blocks so far within c cells; picks[b][c]: the option of block b there.
    costs, picks = [0.0] * (CELLS + 1), []
    blocks = [stage for stage in stages for _ in range(stage.depth)]
    for stage in blocks:
        least = min(option.held for option in stage.options)
        needed = [-int(-(option.held - least) // cell) for option in stage.options]
        row, pick = [], []
        for room in range(CELLS + 1):
            cost, index = min(
                (costs[room - cells] + option.cost, i)
                for i, (cells, option) in enumerate(zip(needed, stage.options, strict=True))
                if cells <= room
            )
            row.append(cost)
            pick.append(index)
        costs = row
        picks.append((pick, needed))
    room, found = CELLS, []
    for stage, (pick, needed) in zip(reversed(blocks), reversed(picks), strict=True):
        found.append(stage.options[pick[room]])
        room -= needed[pick[room]]
    found.reverse()
    chosen, start = [], 0
    for stage in stages:
        chosen.append(sorted(found[start : start + stage.depth], key=lambda option: option.held))
        start += stage.depth
    return chosen


def _names(chosen: list[list[Option]]) -> list[str]:
    return [option.name for stage in chosen for option in stage]


def _held(chosen: list[list[Option]]) -> int:
    return sum(option.held for stage in chosen for option in stage)


def _cost(chosen: list[list[Option]]) -> float:
    return sum(option.cost for stage in chosen for option in stage)
