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


def continue_schedule(schedule: LRScheduler, planned: dict[str, Any]) -> None:
    """Has a schedule with the state of a checkpoint go on as one of this training's length, from the next step on.

    Args:
        planned: its ``state_dict`` before that of the checkpoint was loaded.
    """
    if getattr(schedule, "total_steps", None) != planned.get("total_steps"):
        place = ("last_epoch", "_step_count", "_last_lr")
        vars(schedule).update({name: value for name, value in planned.items() if name not in place})
    elif not isinstance(schedule, LambdaLR):  # it does not depend on the length
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which tells users to call get_last_lr
        rates = schedule.get_lr()
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):  # of an optimizer of few bits
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
