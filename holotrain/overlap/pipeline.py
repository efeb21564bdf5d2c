"""How long groups take that are computed and sent one behind the other, and how rows can be cut into groups."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from holotrain.overlap.groups import equal_sizes

WAVES_SEARCHED = 10
"""Of up to so many units all ways to put them together are tried; of more, groups of equal size."""

MOST_GROUPS = 16
"""Of equal size, at most."""


def makespan(first: Sequence[float], second: Sequence[float], busy: float = 0.0, after: float = 0.0) -> float:
    """Seconds until every group has been through two stages, each of which takes one group at a time.

    FlashOverlap's recurrence: ``C = max(P, C) + t_comm(g[i-1]); P += t_gemm(g[i])``, in all ``max(P, C) + t_comm(last)``.

    Args:
        first: seconds of each group in the first stage (the products, where results are reduced; the link, where rows are
            gathered).
        second: in the second stage.
        busy: seconds for which the second stage is taken at the start; what comes ``after`` needs its result.
        after: seconds of more work for the first stage, behind the last group.
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
    """Group sizes to choose from, each a multiple of ``unit`` but for the last.

    Args:
        rows: in all.
        unit: rows that the device computes in the time of one: a wave.
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
