"""The largest batch and the largest depth that fit.

Lightning's BatchSizeFinder doubles the size until CUDA runs out of memory: it only finds the initial size times a power of two,
needs a GPU, and kills the process on a CPU. The plan has none of these limits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holotrain.planning.planner import Backward, Planner
from holotrain.planning.search import largest
from holotrain.sizes import counted

DEEPER = 4
"""Depths of up to 1 + 1/DEEPER times the configured one are planned exactly. Beyond, memory is extrapolated linearly."""


@dataclass(frozen=True)
class Limit:
    """The largest ``value`` of an option that fits, 0 if none does; not ``exact``: extrapolated."""

    option: str
    configured: int
    value: int
    exact: bool = True


def largest_batch(
    planner: Planner,
    backward: Backward,
    budget: int,
    most: int | None = None,
    begin: Callable[[str], object] = lambda what: None,
) -> Limit:
    """The largest batch that fits.

    Args:
        budget: memory budget in bytes.
        most: upper limit of the batch, if any.
        begin: called with what is planned next.

    Raises:
        Unplannable: an operation needs the values of its inputs.
    """
    batch = planner.batch

    def bound(size: int) -> int:
        begin(f"{batch.name}={size}")
        return planner.footprint(backward, size).bound

    start = max(batch.value // batch.unit, 1) * batch.unit
    return Limit(batch.name, batch.value, largest(bound, budget, min(start, most) if most else start, batch.unit, most))


def largest_depth(
    planner: Planner, backward: Backward, budget: int, begin: Callable[[str], object] = lambda what: None
) -> Limit:
    """The largest depth that fits, with the arguments of :func:`largest_batch`. The planner must have a depth."""
    configured = planner.depth.value
    deeper = configured + max(configured // DEEPER, 1)

    def rehearsed(depth: int) -> int:
        begin(counted(depth, "block"))
        return planner.footprint(backward, depth=None if depth == configured else depth).bound

    def bound(depth: int) -> int:
        if depth <= deeper:
            return rehearsed(depth)
        a, b = rehearsed(configured), rehearsed(deeper)
        return a + (b - a) * (depth - configured) // (deeper - configured)

    found = largest(bound, budget, configured)
    return Limit(planner.depth.name, configured, found, exact=found < deeper)
