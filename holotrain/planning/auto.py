"""Chooses what a training leaves open: the schedule of each block, or the batch size."""

from __future__ import annotations

import torch

from holotrain.planning.allocators import ALLOCATORS
from holotrain.planning.choice import MARGIN, Choice, TooSmall, choose
from holotrain.planning.costs import flops, seconds, stage_of, visits_of
from holotrain.planning.limits import largest_batch
from holotrain.planning.planner import Planner


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
    least = planner.footprint(least_memory(planner)).bound
    if least > budget:  # before anything is timed
        raise TooSmall(least)
    if planner.listed:
        return _choose_checkpointed(planner, budget)
    costs = _seconds(planner, names) if measure else None
    with planner.imagined_step(planner.imagined_model(names[0])) as step:
        visits = visits_of(step)
        if costs is None:
            costs = [flops(visit, names) for visit in visits]
        allocator = ALLOCATORS[planner.device]
        stages = [stage_of(visit, each, step.autocast, allocator) for visit, each in zip(visits, costs, strict=True)]
    return choose(stages, lambda blocks: planner.footprint(blocks).bound, budget)


def _choose_checkpointed(planner: Planner, budget: int) -> Choice:
    """The fewest blocks to checkpoint, first to last, with which the training fits, for blocks that are in no sequence.

    The last ones store their activations, because that memory is free again when the others recompute.
    """

    def blocks(count: int) -> list[str]:
        return ["checkpoint"] * count + ["autograd"] * (planner.listed - count)

    fewest, most = 0, planner.listed  # with `most` it fits
    while fewest < most:
        count = (fewest + most) // 2
        if planner.footprint(blocks(count)).bound <= budget * (1 - MARGIN):
            most = count
        else:
            fewest = count + 1
    # A forward is a third of a block's computation, and checkpointing runs it twice.
    cost = 3 * planner.listed + most
    return Choice(blocks(most), planner.footprint(blocks(most)).bound, cost, 4 * planner.listed)


def choose_batch(planner: Planner, budget: int, least: int = 1, most: int | None = None) -> int:
    """The largest batch that fits under the configured schedules.

    Args:
        budget: memory budget in bytes.
        least, most: limits of the batch.

    Raises:
        TooSmall: not even the smallest batch fits.
        Unplannable: an operation needs the values of its inputs.
    """
    size = largest_batch(planner, planner.backward, int(budget * (1 - MARGIN)), most).value
    if size < least:
        raise TooSmall(planner.footprint(planner.backward, least).bound)
    return size


def least_memory(planner: Planner) -> str:
    """The schedule that needs the least memory."""
    return next(name for name in (_recomputing(planner), "checkpoint", "autograd") if name in planner.schedules)


def _candidates(planner: Planner) -> list[str]:
    recomputing, plain = _recomputing(planner), [name for name in ("autograd", "checkpoint") if name in planner.schedules]
    if recomputing not in planner.schedules:
        return plain
    return [recomputing, *([f"{recomputing}+attention"] if planner.keeps_attention else []), *plain]


def _recomputing(planner: Planner) -> str:
    return "pareprop" if planner.device == "cuda" else "reversible"


def _seconds(planner: Planner, names: list[str]) -> list[dict[str, float]]:
    """Measured seconds of each schedule, for each sequence of the model."""
    with torch.random.fork_rng():
        step = planner.make_step(planner.make_model(names[0], None).to(planner.device), planner.batch.value)
        return [seconds(visit, names, step.autocast) for visit in visits_of(step)]
