"""``backward=auto``: a schedule for each block, so that the run fits the memory it may take with the least time."""

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
        config: with ``backward.blocks`` filled in.
        choice: what was chosen.
        budget: bytes that it keeps within.
    """

    config: RunConfig
    choice: Choice
    budget: int


def settle(planner: Planner, budget: int, measure: bool = True) -> Settled:
    """Chooses, for a configuration whose backward is open.

    Args:
        planner: of that configuration.
        budget: bytes to keep within.
        measure: time each way on the device, which must then be here; False: count FLOPs.

    Raises:
        UserError: nothing fits; the least that would is named.
        Unplannable: an operation cannot be imagined.
    """
    config, device = planner.config, planner.device
    option, size = config.batch_option
    context = partial(autocast_of, config.trainer, "cpu")
    names = ways(config, device)
    least = planner.footprint(size, replace(config.backward, kind=thriftiest(config, device))).bound
    if least > budget:  # said before anything is run
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


def thriftiest(config: RunConfig, device: str) -> str:
    """The schedule under which all blocks take least memory."""
    return ways(config, device)[0] if reversible(config.model.kind) else PLAIN[1]


def ways(config: RunConfig, device: str) -> list[str]:
    """The schedules that a block of this run may have."""
    if not reversible(config.model.kind):
        return list(PLAIN)
    recomputing = "pareprop" if device == "cuda" else "reversible"
    keeping = [] if config.compile else [f"{recomputing}+attention"]  # nothing can be kept within compiled code
    return [recomputing, *keeping, *PLAIN]


def _seconds(planner: Planner, size: int, names: list[str]) -> list[dict[str, float]]:
    """Of each way, for each sequence of the model, on the device."""
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
