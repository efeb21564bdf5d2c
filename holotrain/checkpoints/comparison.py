"""Compares what a checkpoint holds of a training with what a new training has there: types, shapes, lengths.

torch and Lightning take over whatever a state says. A learning rate that is a word fails in the next step, and so does a count
below 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from inspect import signature
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holotrain.optimizers import InBackward
from holotrain.optimizers.low_bit import UnfitState, described
from holotrain.optimizers.stepping import CombinedOptimizer
from holotrain.targets import first_line, is_of

MOST_COUNTED = 2**53
"""Counts up to here are exact as floating-point numbers."""


def require_like(what: str, value: Any, fresh: Any) -> None:
    """Raises an UnfitState if the value in a checkpoint is of another kind than that of a new training (``fresh``; None stands
    for any value), or a count is below 0."""
    if fresh is None or value is fresh:
        return
    if isinstance(fresh, Mapping) and isinstance(value, Mapping):
        for key in fresh.keys() & value.keys():
            require_like(f"{what}.{key}", value[key], fresh[key])
    elif isinstance(fresh, list | tuple) and isinstance(value, list | tuple) and len(value) == len(fresh):
        for one, other in zip(value, fresh, strict=True):
            require_like(what, one, other)
    elif not _alike(value, fresh):
        raise UnfitState(f"{what} does not fit: it is {described(value)}, in place of one like {described(fresh)}")


def _alike(value: Any, fresh: Any) -> bool:
    if isinstance(fresh, bool):
        return value is None or isinstance(value, bool)
    if isinstance(fresh, Tensor):
        return _fits(value, fresh, fresh.shape)
    if not isinstance(fresh, int | float):
        return type(value) is type(fresh) and not (isinstance(fresh, list | tuple) and fresh)  # one of another length
    if type(value) not in (int, float) or (math.isfinite(fresh) and not -MOST_COUNTED <= value <= MOST_COUNTED):
        return False
    return not math.isnan(value) and (value >= 0 or fresh < 0 or isinstance(fresh, float))


def _fits(value: Any, like: Tensor, shape: Sequence[int]) -> bool:
    return isinstance(value, Tensor) and value.shape == shape and value.is_floating_point() == like.is_floating_point()


def require_counts(what: str, value: Any, fresh: Any) -> None:
    """Raises an UnfitState if nested counts, which Lightning takes over without a look, have names that those of a new training
    (``fresh``) lack, or one is no whole number from 0 on."""
    if isinstance(fresh, dict) and isinstance(value, dict) and value.keys() <= fresh.keys():
        for name, each in value.items():
            require_counts(f"{what}.{name}", each, fresh[name])
    elif type(value) is not type(fresh) or isinstance(value, dict) or not 0 <= value <= MOST_COUNTED:
        raise UnfitState(f"{what} does not fit: it is {value!r:.60}, which is not a count")


class FreshState:
    """Keeps what new optimizers and schedules of learning rates hold before a checkpoint is loaded into them."""

    def __init__(self, optimizers: Sequence[Optimizer], schedules: Sequence[Any]) -> None:
        self._groups = [[dict(group) for group in optimizer.param_groups] for optimizer in optimizers]
        nested = chain.from_iterable(getattr(schedule, "_schedulers", ()) for schedule in schedules)
        self._schedules = [(schedule, dict(vars(schedule))) for schedule in (*schedules, *nested)]

    def compare(self, optimizers: Sequence[Optimizer]) -> None:
        """Raises an UnfitState if an option, a schedule or a state of the same optimizers, after the loading, is not of the
        kind that a new one has."""
        for optimizer, before in zip(optimizers, self._groups, strict=True):
            inner = optimizer.optimizer if isinstance(optimizer, InBackward) else optimizer
            parts = inner.parts if isinstance(inner, CombinedOptimizer) else [inner]
            groups = [(part, group) for part in parts for group in part.param_groups]
            for (part, group), fresh in zip(groups, before, strict=True):
                for name in fresh.keys() - {"params"}:
                    require_like(f"the optimizer's {name}", group.get(name), fresh[name])
                _compare_states(part, group, fresh)
        for schedule, before in self._schedules:
            for name, value in vars(schedule).items():
                require_like(f"the schedule's {name}", value, before.get(name, getattr(type(schedule), name, None)))


SIDE = 2
"""The sides of the parameter that stands for others."""


def _compare_states(part: Optimizer, group: dict[str, Any], fresh: dict[str, Any]) -> None:
    """Compares the states of a group's parameters with those that the optimizer makes in its first step."""
    made: dict[int, dict[str, Any]] = {}
    for parameter in group["params"]:
        if parameter.ndim not in made:
            made[parameter.ndim] = _first_state(part, group, fresh, parameter.ndim)
        state = part.state.get(parameter)
        if not state:
            continue
        for name, like in made[parameter.ndim].items():
            value = state.get(name) if isinstance(state, dict) else None
            if not isinstance(like, Tensor):
                require_like(f"the optimizer's {name}", value, like)
            elif like.ndim in (0, parameter.ndim):
                shape = tuple(size if side == SIDE else side for side, size in zip(like.shape, parameter.shape, strict=False))
                if not _fits(value, like, shape):
                    found = described(value)
                    raise UnfitState(f"the optimizer's state does not fit: {name} is {found}, not {like.dtype} {shape}")
            if name == "step" and isinstance(value, Tensor) and not 0 <= value.item() <= MOST_COUNTED:
                raise UnfitState(f"the optimizer's state does not fit: its step is {value.item()}")


def _first_state(part: Any, group: dict[str, Any], fresh: dict[str, Any], ndim: int) -> dict[str, Any]:
    """The state of a small parameter after a step; what cannot be told is left out."""
    if hasattr(part, "fresh_state"):  # low_bit has compared the rest
        return {"step": torch.tensor(0.0)}
    if not is_of(type(part).__module__, ["torch", "holotrain"]):  # others may keep anything, such as lists
        return {}
    try:
        _stepped(part, fresh, ndim)
    except Exception:  # one that needs more than a gradient
        return {}
    try:
        return _stepped(part, group, ndim)
    except Exception as error:  # torch's own checks, and what fails after them
        raise UnfitState(f"the optimizer's options do not fit: {first_line(error)}") from error


def _stepped(part: Optimizer, group: dict[str, Any], ndim: int) -> dict[str, Any]:
    options = {name: group[name] for name in signature(type(part)).parameters if name in group and name != "params"}
    on_a_cpu = {"foreach": None, "fused": None, "capturable": False}
    options |= {name: value for name, value in on_a_cpu.items() if name in options}
    parameter = nn.Parameter(torch.zeros((SIDE,) * ndim, device="cpu"))
    parameter.grad = torch.zeros_like(parameter)
    stand_in = type(part)([parameter], **options)
    stand_in.step()
    return stand_in.state[parameter]
