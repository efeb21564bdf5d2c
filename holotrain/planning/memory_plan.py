"""The memory of a training under each schedule, the largest batch and depth that fit, and the choice of what it leaves open.

Lightning's BatchSizeFinder doubles the size until CUDA runs out of memory: it only finds the initial size times a power of two,
needs a GPU, and kills the process on a CPU. The plan has none of these limits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from holotrain.planning.choice import MARGIN, Choice, TooSmall, choose, flops, seconds, stage_of, visits_of
from holotrain.planning.devices import ALLOCATORS
from holotrain.planning.planner import Backward, Planner
from holotrain.planning.tracker import Footprint
from holotrain.reversible.kept_results import KEEPABLE
from holotrain.schedules import AUTO, PLAIN, REBUILDING, SCHEDULES


def largest(
    bound: Callable[[int], int], budget: int, start: int, unit: int = 1, most: int | None = None, empty: int = 0
) -> int:
    """Returns the largest multiple of ``unit`` whose bound fits the budget; 0 if not even one unit fits.

    The bound must be convex and must not fall as the size grows, like the maximum of several straight lines; the memory of
    batches and of stacked blocks is like this. Then a line through two sizes that fit never underestimates the limit, and a
    line between a size that fits and one that does not never overestimates it. A few bounds are enough.

    Args:
        bound: bytes that a size needs at most.
        start: the first size to try, a multiple of ``unit``.
        most: the largest size allowed, a multiple of ``unit``.
        empty: bytes that a size of 0 needs at least.
    """
    if empty > budget:
        return 0
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
            assert beyond is not None
            guess = _crossing({0: empty, **known}, 0, beyond, budget, unit) or 0
            size = max(min(guess, 3 * beyond // 4 // unit * unit), unit)
            continue
        size = 2 * low if len(fitting) == 1 else _crossing(known, *fitting[-2:], budget, unit) or 2 * low
        if size == low:
            return low
        if beyond is not None and size >= beyond:
            size = max(_crossing(known, low, beyond, budget, unit) or 0, low + unit)
        if most is not None:
            size = min(size, most)


def _crossing(known: dict[int, int], a: int, b: int, budget: int, unit: int) -> int | None:
    """The last size at which the line through two known sizes fits the budget; None if the line never exceeds it."""
    rise = known[b] - known[a]
    return a + (budget - known[a]) * (b - a) // rise // unit * unit if rise > 0 else None


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
) -> Limit:
    """The largest batch that fits.

    Args:
        budget: memory budget in bytes.
        most: upper limit of the batch, if any.

    Raises:
        Unplannable: an operation needs the values of its inputs.
    """
    batch = planner.batch

    def bound(size: int) -> int:
        return planner.footprint(backward, size).bound

    start = max(batch.value // batch.unit, 1) * batch.unit
    start = start if most is None else min(start, most)
    empty = planner.footprint(backward).lasting
    return Limit(batch.name, batch.value, largest(bound, budget, start, batch.unit, most, empty))


def largest_depth(planner: Planner, backward: Backward, budget: int) -> Limit:
    """The largest depth that fits, with the arguments of :func:`largest_batch`. The planner must have a depth."""
    assert planner.depth is not None
    configured = planner.depth.value
    deeper = configured + max(configured // DEEPER, 1)

    def simulated(depth: int) -> int:
        return planner.footprint(backward, depth=None if depth == configured else depth).bound

    def bound(depth: int) -> int:
        if depth <= deeper:
            return simulated(depth)
        a, b = simulated(configured), simulated(deeper)
        return a + (b - a) * (depth - configured) // (deeper - configured)

    found = largest(bound, budget, configured)
    return Limit(planner.depth.name, configured, found, exact=found < deeper)


def choose_schedules(planner: Planner, budget: int, measure: bool = True) -> Choice:
    """The fastest schedule of each block with which the training fits.

    Args:
        budget: memory budget in bytes.
        measure: time each schedule on the device, which this machine must have; False: count FLOPs.

    Raises:
        TooSmall: nothing fits.
        Unplannable: an operation needs the values of its inputs.
    """
    names = _candidates(planner)
    least = least_bytes(planner)
    if least > budget:  # before anything is timed
        raise TooSmall(least)
    if planner.listed:
        return _choose_recomputed(planner, budget)
    costs = _seconds(planner, names) if measure else None
    with planner.fake_step(planner.fake_model(names[0])) as step:
        visits = visits_of(step)
        if costs is None:
            costs = [flops(visit, names) for visit in visits]
        allocator = ALLOCATORS[planner.device]
        stages = [stage_of(visit, each, step.autocast, allocator) for visit, each in zip(visits, costs, strict=True)]
    return choose(stages, lambda blocks: planner.footprint(blocks).bound, budget)


TILED_COST = 0.6
"""Cost of running a block's MLP again, as a fraction of the block's forward."""


def _choose_recomputed(planner: Planner, budget: int) -> Choice:
    """The fewest blocks to checkpoint, first to last, with which the training fits; if it fits with none, the fewest whose
    inputs are offloaded, or rounded to 8 bits. For blocks that are in no sequence.

    The last ones store their activations, because that memory is free again when the others recompute.
    """
    depth = planner.listed
    ways = [["checkpoint"] * count + ["autograd"] * (depth - count) for count in range(depth + 1)]
    if (last := least_memory(planner)) not in ("checkpoint", "autograd"):
        ways += [[last] * count + ["checkpoint"] * (depth - count) for count in range(1, depth + 1)]
    room = budget * (1 - MARGIN)
    first = bisect_left(range(len(ways) - 1), True, key=lambda number: planner.footprint(ways[number]).bound <= room)
    # A forward is a third of a block's computation, and recomputing runs it twice.
    least = depth * (3 + TILED_COST * (planner.tile is not None))
    return Choice(ways[first], planner.footprint(ways[first]).bound, least + min(first, depth), least + depth)


FASTER = 0.97
"""Tiles are chosen if they cost less than this fraction of what it costs without."""


def choose_tile(planner: Planner, tiled: Planner | None, budget: int, measure: bool = True) -> tuple[Planner, Choice]:
    """The fastest schedules of a training, as it is or with MLPs in tiles, with which it fits.

    Args:
        tiled: the planner of the same training with MLPs in tiles; None: it cannot be.
        budget, measure: as :func:`choose_schedules` takes them.

    Returns:
        one of the planners, and its schedules.

    Raises:
        TooSmall: neither fits.
        Unplannable: an operation needs the values of its inputs.
    """
    choices, least = [], []
    for each in (planner,) if tiled is None else (planner, tiled):
        try:
            choices.append((each, choose_schedules(each, budget, measure)))
        except TooSmall as error:
            least.append(error.least)
    if not choices:
        raise TooSmall(min(least))
    first, last = choices[0], choices[-1]
    return last if last[1].cost < FASTER * first[1].cost else first


def choose_batch(planner: Planner, budget: int, least: int = 1, most: int | None = None) -> int:
    """The largest batch that fits under the configured schedules.

    Args:
        budget: memory budget in bytes.
        least, most: limits of the batch.

    Raises:
        TooSmall: not even the smallest batch fits.
        Unplannable: an operation needs the values of its inputs.
    """
    assert planner.backward is not None
    size = largest_batch(planner, planner.backward, int(budget * (1 - MARGIN)), most).value
    if size < least:
        raise TooSmall(planner.footprint(planner.backward, least).bound)
    return size


def least_memory(planner: Planner) -> str:
    """The schedule that needs the least memory."""
    names = [name for name, each in SCHEDULES.items() if not each.ahead and (each.exact or planner.inexact)]
    return next(name for name in reversed(names) if name in planner.schedules)


def least_bytes(planner: Planner) -> int:
    """What a training needs under that schedule."""
    return planner.footprint(least_memory(planner)).bound


def rows_in_tiles(tiled: Planner) -> list[str]:
    """The schedules that a plan shows of a training with MLPs in tiles."""
    if REBUILDING[0] in tiled.schedules:
        return [REBUILDING[0]]
    return [name for name in tiled.schedules if name == PLAIN[1] or not SCHEDULES[name].exact]


def _candidates(planner: Planner) -> list[str]:
    """Those that make gradients inexact are not among them, nor on a CPU those for a GPU."""
    names = []
    for name in (*REBUILDING, *PLAIN):
        schedule = SCHEDULES[name]
        if name not in planner.schedules or not schedule.exact or (schedule.gpu and planner.device != "cuda"):
            continue
        names.append(name)
        if schedule.kind == "rebuilt" and planner.keeps_results:
            names += [f"{name}+{result}" for result in KEEPABLE]
    return names


def _seconds(planner: Planner, names: list[str]) -> list[dict[str, float]]:
    """Measured seconds of each schedule, for each sequence of the model."""
    with torch.random.fork_rng():
        step = planner.make_step(planner.make_model(names[0], None).to(planner.device), planner.batch.value)
        return [seconds(visit, names, step.autocast) for visit in visits_of(step)]


@dataclass(frozen=True)
class Plan:
    """
    Args:
        device: device of the plan.
        budget: memory budget in bytes; None: not known.
        backward: name of the configured schedules in ``footprints``.
        schedule: these schedules; if they were open, the choice.
        footprints: memory of a step under each schedule.
        choice: the choice of schedules, if they were open.
        limits: largest batch and depth under the configured schedules; empty without a budget.
        options: what else was chosen: MLPs in tiles, or nothing.
    """

    device: str
    budget: int | None
    backward: str
    schedule: Backward
    footprints: dict[str, Footprint]
    choice: Choice | None
    limits: list[Limit]
    options: str = ""

    @property
    def configured(self) -> Footprint:
        return self.footprints[self.backward]

    @property
    def fits(self) -> bool | None:
        return None if self.budget is None else self.configured.bound <= self.budget

    def as_json(self) -> dict[str, Any]:
        """The plan in plain containers; sizes in bytes."""
        return {
            "device": self.device,
            "budget_bytes": self.budget,
            "backward": self.backward,
            "fits": self.fits,
            "peak_bytes": self.configured.bound,
            "blocks": self.choice.blocks if self.choice else None,
            "options": self.options or None,
            "footprints": {
                name: asdict(footprint) | {"scratch": footprint.scratch, "bound": footprint.bound}
                for name, footprint in self.footprints.items()
            },
            "largest": {limit.option: limit.value for limit in self.limits},
        }


def make_plan(planner: Planner, budget: int | None, tiled: Planner | None = None) -> Plan:
    """
    Args:
        budget: memory budget in bytes; None: not known, which needs a planner with configured schedules.
        tiled: the planner of the same training with MLPs in tiles, which has rows of its own; None: it cannot be.

    Raises:
        Unplannable: an operation needs the values of its inputs.
    """
    footprints = {name: planner.footprint(name) for name in planner.schedules}
    if tiled is not None:
        for row in rows_in_tiles(tiled):
            footprints[f"{row} backward.tile={tiled.tile}"] = tiled.footprint(row)
    choice, backward, options = None, planner.backward, ""
    if backward is None:
        assert budget is not None
        try:
            found, choice = choose_tile(planner, tiled, budget, measure=False)
            backward, options = choice.blocks, "" if found is planner else f"backward.tile={found.tile}"
            planner = found
        except TooSmall:  # the table shows by how much
            backward = least_memory(planner)
    name = backward if isinstance(backward, str) else AUTO
    if name not in footprints:
        footprints[name] = planner.footprint(backward)
    limits = []
    if budget is not None:
        # For another batch, a choice can go down to the schedule with the least memory.
        varied = backward if isinstance(backward, str) else least_memory(planner)
        limits = [largest_batch(planner, varied, budget)]
        if planner.depth is not None:
            limits.append(largest_depth(planner, varied, budget))
    return Plan(planner.device, budget, name, backward, footprints, choice, limits, options)
