"""The memory of a training under each backward, and the largest batch and depth that fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import lightning.pytorch as pl

from holotrain.config.build_plan import Planner
from holotrain.config.choose_backward import Settled, least_memory, settle
from holotrain.config.choose_batch import largest_batch
from holotrain.config.schema import RunConfig
from holotrain.config.schema.backward import AUTO, BackwardConfig, reversible, schedules_of
from holotrain.errors import UserError
from holotrain.planning import Footprint, largest

DEEPER = 4
"""Depths of up to 1 + 1/DEEPER times the configured one are planned exactly. Beyond, memory is extrapolated linearly."""


@dataclass(frozen=True)
class Limit:
    """The largest ``value`` of an option that fits, 0 if none does; not ``exact``: extrapolated."""

    option: str
    configured: int
    value: int
    exact: bool = True


@dataclass(frozen=True)
class Plan:
    """
    Args:
        device: device of the plan.
        budget: memory budget in bytes; None: not known.
        backward: name of the configured backward in ``footprints``.
        schedule: its configuration; for ``backward=auto``, the choice.
        footprints: memory of a step under each backward.
        choice: the choice of ``backward=auto``, if configured.
        limits: largest batch and depth under the configured backward; empty without a budget.
        resets: overrides that reset options which other backwards do not support.
    """

    device: str
    budget: int | None
    backward: str
    schedule: BackwardConfig
    footprints: dict[str, Footprint]
    choice: Settled | None
    limits: list[Limit]
    resets: str = ""

    @property
    def configured(self) -> Footprint:
        return self.footprints[self.backward]

    @property
    def fits(self) -> bool | None:
        return None if self.budget is None else self.configured.bound <= self.budget

    @property
    def remedies(self) -> list[str]:
        """Overrides, each of which makes the run fit; those that store most come first."""
        if self.budget is None:
            return []
        fitting = [name for name, footprint in self.footprints.items() if footprint.bound <= self.budget]
        sizes = [f"{limit.option}={limit.value}" for limit in self.limits if limit.value]
        return [f"backward={name}{self.resets}" for name in fitting if name != self.backward] + sizes

    def as_json(self) -> dict[str, Any]:
        """The plan in plain containers; sizes in bytes."""
        return {
            "device": self.device,
            "budget_bytes": self.budget,
            "backward": self.backward,
            "fits": self.fits,
            "blocks": self.choice.choice.blocks if self.choice else None,
            "footprints": {
                name: asdict(footprint) | {"scratch": footprint.scratch, "bound": footprint.bound}
                for name, footprint in self.footprints.items()
            },
            "largest": {limit.option: limit.value for limit in self.limits},
            "remedies": [] if self.fits else self.remedies,
        }


def make_plan(
    config: RunConfig,
    data: pl.LightningDataModule,
    device: str,
    budget: int | None,
    begin: Callable[[str], object] = lambda what: None,
) -> Plan:
    """
    Args:
        data: set up.
        device: ``"cuda"`` or ``"cpu"``.
        begin: called with what is planned next.

    Raises:
        Unplannable: an operation needs the values of its inputs.
    """
    planner = Planner(config, data, device)
    size = config.batch_option[1]
    footprints = {}
    for name, backward in _backwards(config).items():
        begin(f"backward={name}")
        footprints[name] = planner.footprint(size, backward)
    choice, backward, name = None, config.backward, config.backward.kind
    if config.backward.open:
        begin("backward=auto")
        try:
            choice = settle(planner, budget, measure=False)
            backward = choice.config.backward
        except UserError:  # nothing fits: the table shows by how much
            name = least_memory(config, device)
            backward = BackwardConfig(name, exact=config.backward.exact)
    if name not in footprints:
        begin(f"backward={name}")
        footprints[name] = planner.footprint(size, backward)
    schedule = backward
    if backward.kind == AUTO:  # for another batch, auto can go down to the schedule with the least memory
        backward = BackwardConfig(least_memory(config, device), exact=config.backward.exact)
    limits = [] if budget is None else _limits(planner, backward, budget, begin)
    return Plan(device, budget, name, schedule, footprints, choice, limits, _resets(config.backward))


def _resets(backward: BackwardConfig) -> str:
    undone = {"store": "0", "keep": "[]", "blocks": "[]"}
    return "".join(f" backward.{name}={value}" for name, value in undone.items() if getattr(backward, name))


def _backwards(config: RunConfig) -> dict[str, BackwardConfig]:
    """All backwards of the model, the configured one with its options."""
    exact = config.backward.exact if reversible(config.model.kind) else False
    plain = {name: BackwardConfig(name, exact=exact) for name in schedules_of(config.model.kind)}
    return plain | ({config.backward.kind: config.backward} if config.backward.kind != AUTO else {})


def _limits(planner: Planner, backward: BackwardConfig, budget: int, begin: Callable[[str], object]) -> list[Limit]:
    """The largest batch and, unless ``store`` depends on the depth, the largest depth."""
    option, configured = planner.config.batch_option
    size = largest_batch(planner, backward, budget, begin=lambda size: begin(f"{option}={size}"))
    found = [Limit(option, configured, size)]
    if not backward.store:
        found.append(_depth(planner, backward, budget, begin))
    return found


def _depth(planner: Planner, backward: BackwardConfig, budget: int, begin: Callable[[str], object]) -> Limit:
    model = planner.config.model
    stages = getattr(model, "depths", None)
    stage = None if stages is None else max(range(len(stages)), key=stages.__getitem__)
    configured = model.depth if stage is None else stages[stage]
    deeper = configured + max(configured // DEEPER, 1)
    size = planner.config.batch_option[1]

    def rehearsed(depth: int) -> int:
        begin(f"{depth} blocks")
        if depth == configured:
            return planner.footprint(size, backward).bound
        sizes = {"depth": depth} if stage is None else {"depths": [*stages[:stage], depth, *stages[stage + 1 :]]}
        return planner.footprint(size, backward, **sizes).bound

    def bound(depth: int) -> int:
        if depth <= deeper:
            return rehearsed(depth)
        a, b = rehearsed(configured), rehearsed(deeper)
        return a + (b - a) * (depth - configured) // (deeper - configured)

    option = "model.depth" if stage is None else f"model.depths.{stage}"
    found = largest(bound, budget, configured)
    return Limit(option, configured, found, exact=found < deeper)
