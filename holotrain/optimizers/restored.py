"""What a checkpoint has put into optimizers and schedules, compared with what they held when they were new.

torch takes over whatever a state says. A learning rate that is a word fails in the next step, and so does a count below 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holotrain.optimizers.low_bit import UnfitState, described
from holotrain.optimizers.stepping import CombinedOptimizer, InBackward

MOST_COUNTED = 2**53
"""Counts up to here are exact as floating-point numbers."""


class Fresh:
    """Keeps what optimizers and schedules hold before a checkpoint is loaded into them.

    Args:
        optimizers: new ones.
        schedules: those of their learning rates.
    """

    def __init__(self, optimizers: Sequence[Optimizer], schedules: Sequence[Any]) -> None:
        self._groups = [[dict(group) for group in optimizer.param_groups] for optimizer in optimizers]
        nested = chain.from_iterable(getattr(schedule, "_schedulers", ()) for schedule in schedules)
        self._schedules = [(schedule, dict(vars(schedule))) for schedule in (*schedules, *nested)]

    def compare(self, optimizers: Sequence[Optimizer]) -> None:
        """
        Args:
            optimizers: the same ones, after the loading.

        Raises:
            UnfitState: an option, a schedule or a state is not of the kind that a new one has.
        """
        for optimizer, before in zip(optimizers, self._groups, strict=True):
            for (part, group), fresh in zip(_groups(optimizer), before, strict=True):
                for name in fresh.keys() - {"params"}:
                    require_like(f"the optimizer's {name}", group.get(name), fresh[name])
                _require_states(part, group, fresh)
        for schedule, before in self._schedules:
            for name, value in vars(schedule).items():
                require_like(f"the schedule's {name}", value, before.get(name, getattr(type(schedule), name, None)))


def _groups(optimizer: Optimizer) -> Iterator[tuple[Optimizer, dict[str, Any]]]:
    """The parameter groups, each with the optimizer that steps it."""
    if isinstance(optimizer, InBackward):
        optimizer = optimizer.optimizer
    for part in optimizer.parts if isinstance(optimizer, CombinedOptimizer) else [optimizer]:
        yield from ((part, group) for group in part.param_groups)


def require_like(what: str, value: Any, fresh: Any) -> None:
    """
    Args:
        value: what a checkpoint says.
        fresh: what a new run has there; None stands for any value.

    Raises:
        UnfitState: the value is of another kind, or a count is below 0.
    """
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


def _require_states(part: Optimizer, group: dict[str, Any], fresh: dict[str, Any]) -> None:
    """Compares the states of a group's parameters with those that the optimizer makes in its first step."""
    made: dict[int, dict[str, Any]] = {}
    for parameter in group["params"]:
        if parameter.ndim not in made:
            made[parameter.ndim] = _made(part, group, fresh, parameter.ndim)
        if state := part.state.get(parameter):
            _require_state(state, made[parameter.ndim], parameter.shape)


def _require_state(state: Any, made: dict[str, Any], of: Sequence[int]) -> None:
    for name, like in made.items():
        value = state.get(name) if isinstance(state, dict) else None
        if not isinstance(like, Tensor):
            require_like(f"the optimizer's {name}", value, like)
        elif (shape := _shape(like, of)) is not None and not _fits(value, like, shape):
            raise UnfitState(f"the optimizer's state does not fit: {name} is {described(value)}, not {like.dtype} {shape}")
        if name == "step" and isinstance(value, Tensor) and not 0 <= value.item() <= MOST_COUNTED:
            raise UnfitState(f"the optimizer's state does not fit: its step is {value.item()}")


KNOWN = ("torch", "holotrain")
"""Packages whose optimizers keep states of the shapes of parameters. Those of others may keep anything, such as lists."""

SIDE = 2
"""The sides of the parameter that stands for others."""


def _shape(like: Tensor, of: Sequence[int]) -> tuple[int, ...] | None:
    """The shape of a part of the state of a parameter of shape ``of``; None: it cannot be told."""
    if like.ndim == len(of):
        return tuple(size if side == SIDE else side for side, size in zip(like.shape, of, strict=True))
    return () if like.ndim == 0 else None


def _made(part: Any, group: dict[str, Any], fresh: dict[str, Any], ndim: int) -> dict[str, Any]:
    """The state of a small parameter after a step; what cannot be told is left out."""
    if hasattr(part, "fresh_state"):  # low_bit has compared the rest
        return {"step": torch.tensor(0.0)}
    if type(part).__module__.partition(".")[0] not in KNOWN:
        return {}
    try:
        _stepped(part, fresh, ndim)
    except Exception:  # one that needs more than a gradient
        return {}
    try:
        return _stepped(part, group, ndim)
    except Exception as error:  # torch's own checks, and what fails after them
        raise UnfitState(f"the optimizer's options do not fit: {str(error).strip().partition(chr(10))[0]}") from error


def _stepped(part: Optimizer, group: dict[str, Any], ndim: int) -> dict[str, Any]:
    options = {name: group[name] for name in signature(type(part)).parameters if name in group and name != "params"}
    on_a_cpu = {"foreach": None, "fused": None, "capturable": False}
    options |= {name: value for name, value in on_a_cpu.items() if name in options}
    parameter = nn.Parameter(torch.zeros((SIDE,) * ndim, device="cpu"))
    parameter.grad = torch.zeros_like(parameter)
    stand_in = type(part)([parameter], **options)
    stand_in.step()
    return stand_in.state[parameter]
