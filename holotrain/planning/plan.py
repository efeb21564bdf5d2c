"""The memory of a training under each schedule, and the largest batch and depth that fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from holotrain.planning.auto import choose_schedules, least_memory
from holotrain.planning.choice import Choice, TooSmall
from holotrain.planning.footprint import Footprint
from holotrain.planning.limits import Limit, largest_batch, largest_depth
from holotrain.planning.planner import Backward, Planner

AUTO = "auto"
"""Name in a plan of schedules that were chosen or given for each block."""


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
    """

    device: str
    budget: int | None
    backward: str
    schedule: Backward
    footprints: dict[str, Footprint]
    choice: Choice | None
    limits: list[Limit]

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
            "footprints": {
                name: asdict(footprint) | {"scratch": footprint.scratch, "bound": footprint.bound}
                for name, footprint in self.footprints.items()
            },
            "largest": {limit.option: limit.value for limit in self.limits},
        }


def make_plan(planner: Planner, budget: int | None, begin: Callable[[str], object] = lambda what: None) -> Plan:
    """
    Args:
        budget: memory budget in bytes; None: not known, which needs a planner with configured schedules.
        begin: called with what is planned next.

    Raises:
        Unplannable: an operation needs the values of its inputs.
    """
    footprints = {}
    for name in planner.schedules:
        begin(f"backward={name}")
        footprints[name] = planner.footprint(name)
    choice, backward = None, planner.backward
    if backward is None:
        begin(f"backward={AUTO}")
        try:
            choice = choose_schedules(planner, budget, measure=False)
            backward = choice.blocks
        except TooSmall:  # the table shows by how much
            backward = least_memory(planner)
    name = backward if isinstance(backward, str) else AUTO
    if name not in footprints:
        begin(f"backward={name}")
        footprints[name] = planner.footprint(backward)
    limits = []
    if budget is not None:
        # For another batch, a choice can go down to the schedule with the least memory.
        varied = backward if isinstance(backward, str) else least_memory(planner)
        limits = [largest_batch(planner, varied, budget, begin=begin)]
        if planner.depth is not None:
            limits.append(largest_depth(planner, varied, budget, begin))
    return Plan(planner.device, budget, name, backward, footprints, choice, limits)
