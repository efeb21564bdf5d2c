"""The time of groups that are computed and sent one after the other, and the ways to split rows into groups."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from holotrain.overlap.groups import equal_sizes

WAVES_SEARCHED = 10
"""Up to this number of units all groupings are tried; beyond it only groups of equal size."""

MOST_GROUPS = 16
"""The largest number of groups of equal size."""


def makespan(first: Sequence[float], second: Sequence[float], busy: float = 0.0, after: float = 0.0) -> float:
    """Seconds until every group has passed two stages, each of which processes one group at a time.

    FlashOverlap's recurrence: ``C = max(P, C) + t_comm(g[i-1]); P += t_gemm(g[i])``, in all ``max(P, C) + t_comm(last)``.

    Args:
        first: seconds of each group in the first stage (the products if results are reduced, the link if rows are gathered).
        second: seconds of each group in the second stage.
        busy: seconds for which the second stage is busy at the start; the work of ``after`` needs its result.
        after: seconds of further work in the first stage, after the last group.
    """
    ready, done = 0.0, busy
    for one, two in zip(first, second, strict=True):
        ready += one
        done = max(ready, done) + two
    return max(max(ready, busy) + after, done)


def compositions(units: int) -> Iterator[list[int]]:
    """All ways to write ``units`` as an ordered sum of positive numbers: 2^(units - 1)."""
    for cuts in range(1 << (units - 1)):
        sizes = [1]
        for unit in range(units - 1):
            if cuts >> unit & 1:
                sizes.append(1)
            else:
                sizes[-1] += 1
        yield sizes


def candidates(rows: int, unit: int) -> Iterator[list[int]]:
    """Yields the group sizes to choose from. All sizes but the last are multiples of ``unit``.

    Args:
        rows: the total number of rows.
        unit: rows that the device computes in the time of one row: a wave.
    """
    units = math.ceil(rows / unit)
    if units <= WAVES_SEARCHED:
        of_units: Iterator[list[int]] = compositions(units)
    else:
        of_units = (equal_sizes(units, groups) for groups in range(1, min(units, MOST_GROUPS) + 1))
    for sizes in of_units:
        whole = [size * unit for size in sizes]
        whole[-1] -= units * unit - rows
        yield whole
