"""Learning-rate schedules over a known number of optimizer steps, each after a linear warm-up.

Each is a function of the step only, so a training that is resumed with more steps follows the longer schedule.
"""

import math
from collections.abc import Callable, Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def cosine(optimizer: Optimizer, steps: int, warmup: float = 0.0, final: float = 0.0) -> LambdaLR:
    """Half a cosine from the optimizer's learning rate down to ``final`` times that rate.

    Args:
        steps: optimizer steps of the whole training.
        warmup: the share of steps, in [0, 1), over which the learning rate first rises linearly from almost zero.
        final: the last learning rate divided by the highest.
    """
    rise = round(warmup * steps)

    def factor(step: int) -> float:
        done = min((step - rise) / max(steps - rise, 1), 1.0)
        return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2

    return _warmed_up(optimizer, rise, factor)


def multistep(
    optimizer: Optimizer, steps: int, warmup: float = 0.0, milestones: Sequence[float] = (0.6, 0.8), gamma: float = 0.1
) -> LambdaLR:
    """Multiplies the learning rate by ``gamma`` at each milestone, given as a share of the training in (0, 1)."""
    return _warmed_up(
        optimizer, round(warmup * steps), lambda step: gamma ** sum(step >= round(part * steps) for part in milestones)
    )


def constant(optimizer: Optimizer, steps: int, warmup: float = 0.0) -> LambdaLR:
    """A constant learning rate, the optimizer's."""
    return _warmed_up(optimizer, round(warmup * steps), lambda step: 1.0)


def _warmed_up(optimizer: Optimizer, rise: int, factor: Callable[[int], float]) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: (step + 1) / (rise + 1) if step < rise else factor(step))
