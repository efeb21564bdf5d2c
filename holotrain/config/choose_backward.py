"""``backward=auto``: chooses the fastest schedule of each block with which the run fits into its memory budget."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import lightning.pytorch as pl
import torch

from holotrain.config.budget import too_little
from holotrain.config.build import build_task
from holotrain.config.build_plan import Planner, doubled
from holotrain.config.devices import autocast_of
from holotrain.config.schema import RunConfig
from holotrain.config.schema.backward import PLAIN, reversible
from holotrain.data.example import example_batch
from holotrain.models.schedules import sequences
from holotrain.planning import ALLOCATORS, Choice, TooSmall, choose, flops, seconds, stage_of, visited


@dataclass(frozen=True)
class Settled:
    """
    Args:
        config: the configuration with ``backward.blocks`` filled in.
        choice: the choice.
        budget: memory budget in bytes.
    """

    config: RunConfig
    choice: Choice
    budget: int


def settle(planner: Planner, budget: int, measure: bool = True) -> Settled:
    """Chooses the schedules of a configuration with ``backward=auto``.

    Args:
        planner: planner of this configuration.
        budget: memory budget in bytes.
        measure: time each schedule on the device, which this machine must have; False: count FLOPs.

    Raises:
        UserError: nothing fits; the message has the smallest sufficient budget.
        Unplannable: an operation needs the values of its inputs.
    """
    config, device = planner.config, planner.device
    option, size = config.batch_option
    context = partial(autocast_of, config.trainer, "cpu")
    names = ways(config, device)
    least = planner.footprint(size, replace(config.backward, kind=least_memory(config, device))).bound
    if least > budget:  # before anything is timed
        raise too_little(budget, least, f"{option}={size}")
    costs = _seconds(planner, size, names) if measure else None
    with planner.step(size, config.backward) as step:
        with visited(sequences(step.model)) as visits, torch.no_grad(), context():
            step.loss()
        if costs is None:
            costs = [flops(visit, names) for visit in visits]
        stages = [stage_of(visit, each, context, ALLOCATORS[device]) for visit, each in zip(visits, costs, strict=True)]

    def bound(blocks: list[str]) -> int:
        return planner.footprint(size, replace(config.backward, blocks=blocks)).bound

    try:
        choice = choose(stages, bound, budget)
    except TooSmall as error:
        raise too_little(budget, error.least, f"{option}={size}") from error
    return Settled(replace(config, backward=replace(config.backward, blocks=choice.blocks)), choice, budget)


def least_memory(config: RunConfig, device: str) -> str:
    """The schedule that needs the least memory."""
    return ways(config, device)[0] if reversible(config.model.kind) else PLAIN[1]


def ways(config: RunConfig, device: str) -> list[str]:
    """The schedules to choose from."""
    if not reversible(config.model.kind):
        return list(PLAIN)
    recomputing = "pareprop" if device == "cuda" else "reversible"
    keeping = [] if config.compile else [f"{recomputing}+attention"]  # compiled blocks cannot keep results
    return [recomputing, *keeping, *PLAIN]


def _seconds(planner: Planner, size: int, names: list[str]) -> list[dict[str, float]]:
    """Measured seconds of each schedule, for each sequence of the model."""
    config, place = planner.config, torch.device(planner.device)
    with torch.random.fork_rng():
        task = build_task(replace(config, compile=False), planner.data).to(place)
        batch = example_batch(planner.data, size)
        if config.trainer.precision == "64-true":
            task, batch = task.double(), doubled(batch)
        batch = pl.utilities.move_data_to_device(batch, place)
        context = partial(autocast_of, config.trainer, planner.device)
        with visited(sequences(task.model)) as visits, torch.no_grad(), context():
            task.loss(*task.inputs(batch))
        return [seconds(visit, names, context) for visit in visits]
