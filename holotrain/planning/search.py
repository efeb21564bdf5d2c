"""The largest size whose memory fits."""

from __future__ import annotations

from collections.abc import Callable


def largest(bound: Callable[[int], int], budget: int, start: int, unit: int = 1, most: int | None = None) -> int:
    """Returns the largest multiple of ``unit`` whose bound fits the budget; 0 if not even one unit fits.

    The bound must be convex and must not fall as the size grows, like the maximum of several straight lines; the memory of
    batches and of stacked blocks is like this. Then a line through two sizes that fit never underestimates the limit, and a
    line between a size that fits and one that does not never overestimates it. A few bounds are enough.

    Args:
        bound: bytes that a size needs at most.
        start: the first size to try, a multiple of ``unit``.
        most: the largest size allowed, a multiple of ``unit``.
    """
    known: dict[int, int] = {}
    size = start
    while True:
        known[size] = bound(size)
        fitting = sorted(size for size, taken in known.items() if taken <= budget)
        beyond = min((size for size, taken in known.items() if taken > budget), default=None)
        low = fitting[-1] if fitting else 0
        if low == most or beyond == low + unit:
            return low
        if not fitting:
            size = max(beyond // 2 // unit, 1) * unit
            continue
        size = 2 * low if len(fitting) == 1 else _crossing(known, *fitting[-2:], budget, unit) or 2 * low
        if size == low:
            return low
        if beyond is not None and size >= beyond:
            size = max(_crossing(known, low, beyond, budget, unit), low + unit)
        if most is not None:
            size = min(size, most)


def _crossing(known: dict[int, int], a: int, b: int, budget: int, unit: int) -> int | None:
    """The last size at which the line through two known sizes fits the budget; None if the line never exceeds it."""
    rise = known[b] - known[a]
    return a + (budget - known[a]) * (b - a) // rise // unit * unit if rise > 0 else None
