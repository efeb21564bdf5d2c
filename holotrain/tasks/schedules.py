"""Learning-rate schedules over a known number of optimizer steps, each after a linear warm-up.

Each is a function of the step only, so a training that is resumed with more steps follows the longer schedule.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from holotrain.numeric import require_within


def cosine(optimizer: Optimizer, steps: int, warmup: float = 0.0, final: float = 0.0) -> LambdaLR:
    """Half a cosine from the optimizer's learning rate down to ``final`` times that rate.

    Args:
        steps: optimizer steps of the whole training
        warmup: fraction of the training during which the learning rate rises linearly from 0
        final: final learning rate divided by the peak

    Raises:
        ValueError: a fraction out of range.
    """
    require_within(0, 1, closed=True, final=final)
    rise = round(warmup * steps)

    def factor(step: int) -> float:
        done = min((step - rise) / max(steps - rise, 1), 1.0)
        return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2

    return _warmed_up(optimizer, steps, warmup, factor)


def constant(optimizer: Optimizer, steps: int, warmup: float = 0.0) -> LambdaLR:
    """A constant learning rate, the optimizer's.

    Args:
        steps: optimizer steps of the whole training
        warmup: fraction of the training during which the learning rate rises linearly from 0

    Raises:
        ValueError: a fraction out of range.
    """
    return _warmed_up(optimizer, steps, warmup, lambda step: 1.0)


def _warmed_up(optimizer: Optimizer, steps: int, warmup: float, factor: Callable[[int], float]) -> LambdaLR:
    require_within(0, 1, warmup=warmup)
    rise = round(warmup * steps)
    return LambdaLR(optimizer, lambda step: (step + 1) / (rise + 1) if step < rise else factor(step))


def continue_schedule(schedule: LRScheduler, planned: dict[str, Any], before: dict[str, Any] | None = None) -> None:
    """Has a schedule with the state of a checkpoint go on as one of this training, from the next step on.

    Args:
        planned: its ``state_dict`` before that of the checkpoint was loaded.
        before: that of the checkpoint's training, before its first step; what has changed since is taken over. None: unknown.
    """
    place = ("last_epoch", "_step_count", "_last_lr")
    if before is not None:
        changed = {name for name in planned if name in before and planned[name] != before[name]}
    else:
        changed = set(planned) if getattr(schedule, "total_steps", None) != planned.get("total_steps") else set()
    vars(schedule).update({name: planned[name] for name in changed.difference(place)})
    if "total_steps" not in changed and not isinstance(schedule, LambdaLR):
        return  # it depends on neither the length nor the first rates
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which tells users to call get_last_lr
        rates = schedule.get_lr()
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        set_rate(group, rate)


def set_rate(group: dict[str, Any], rate: float | Tensor) -> None:
    """Sets the rate of a group of parameters."""
    if isinstance(group["lr"], Tensor):  # of an optimizer of few bits, or in a graph
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of each group of parameters, without what is no plain value."""
    kinds = (bool, int, float, str, tuple, list, type(None))
    groups = [{name: v.item() if isinstance(v, Tensor) else v for name, v in group.items()} for group in optimizer.param_groups]
    return [{name: v for name, v in group.items() if name != "params" and isinstance(v, kinds)} for group in groups]


def take_over(optimizer: Optimizer, planned: list[dict[str, Any]], before: list[dict[str, Any]]) -> None:
    """Has an optimizer with the state of a checkpoint go on with the options of this training.

    Args:
        planned: what :func:`options_of` returned before the state was loaded.
        before: that of the checkpoint's training, before its first step. Only what has changed since is taken over, because a
            schedule or the optimizer itself may change others.
    """
    for group, now, then in zip(optimizer.param_groups, planned, before, strict=False):
        for name in [name for name in now if name in then and name in group and now[name] != then[name]]:
            if name != "lr":
                group[name] = now[name]
            elif isinstance(then["lr"], float) and then["lr"] > 0:  # a schedule may have changed it
                set_rate(group, float(group["lr"]) * now["lr"] / then["lr"])
            else:
                set_rate(group, now["lr"])
