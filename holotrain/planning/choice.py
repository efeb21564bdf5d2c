"""Chooses what each block stores, so that a step fits a budget and takes the least time.

A block can store or recompute its activations in several ways, which cost memory or time. The choice for all blocks is a
knapsack problem. It is solved exactly under the assumption that the memory of blocks adds up. The real peak is lower, because
what the last blocks store is free again when the first are recomputed. So each choice is rehearsed, and memory that is left is
used in another round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

CELLS = 2000
"""Number of cells that the available memory is divided into; the memory of a block is rounded up to whole cells."""

MARGIN = 0.002
"""Of a budget, left free for small temporaries of operations, which neither the peak nor the bound of a plan includes."""

ROUNDS = 6
"""The most rehearsals of a choice, in addition to those of the smallest and the fastest choice."""


@dataclass(frozen=True)
class Option:
    """One schedule of a block.

    Args:
        name: the schedule, as in :class:`~holotrain.reversible.ReversibleSequence`.
        held: bytes kept for the backward.
        cost: of a forward and a backward, in any unit.
    """

    name: str
    held: int
    cost: float


@dataclass(frozen=True)
class Stage:
    """Consecutive identical blocks."""

    depth: int
    options: Sequence[Option]


@dataclass(frozen=True)
class Choice:
    """
    Args:
        blocks: the schedule of each block, first to last.
        bound: bytes that the rehearsed step needs at most.
        cost: of all blocks.
        most_expensive: the cost if every block recomputes as much as it can.
    """

    blocks: list[str]
    bound: int
    cost: float
    most_expensive: float


class TooSmall(ValueError):
    """Nothing fits the budget; ``least`` is the smallest bound."""

    def __init__(self, least: int) -> None:
        super().__init__(f"nothing needs less than {least} bytes")
        self.least = least


def choose(stages: Sequence[Stage], bound: Callable[[list[str]], int], budget: int) -> Choice:
    """Returns the cheapest choice whose rehearsed bound fits the budget minus a margin; the smallest choice may use the margin.

    Args:
        bound: bytes that a step needs at most, given the schedule of each block.

    Raises:
        TooSmall: not even the smallest choice fits the budget.
    """
    known: dict[tuple[str, ...], int] = {}

    def rehearsed(chosen: list[list[Option]]) -> int:
        names = tuple(_names(chosen))
        if names not in known:
            known[names] = bound(list(names))
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
        # The bound is convex in the held bytes, so a line between a choice that fits and one that does not is safe.
        share = (room - rehearsed(best)) / (rehearsed(beyond) - rehearsed(best))
        low = _held(best) - _held(least)
        chosen = cheapest(stages, low + (_held(beyond) - _held(best)) * share)
        if _names(chosen) == _names(best):
            chosen = cheapest(stages, (low + high) / 2)
    return Choice(_names(best), rehearsed(best), _cost(best), _cost(least))


def cheapest(stages: Sequence[Stage], spare: float) -> list[list[Option]]:
    """Returns the options of each stage's blocks with the least total cost that hold at most ``spare`` bytes above the minimum.

    Within a stage the options that hold most come last: their memory is free again when the other blocks recompute.
    """
    cell = max(spare, 1) / CELLS
    # costs[c]: least cost of the blocks so far within c cells; picks[b][c]: the option of block b for it.
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
