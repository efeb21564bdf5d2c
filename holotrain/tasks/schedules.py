"""Learning-rate schedules over a known number of optimizer steps, each after a linear warm-up.

Each is a function of the step alone, so a training that is resumed with more steps ahead follows the longer schedule.
"""

import math
from collections.abc import Callable, Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def cosine(optimizer: Optimizer, steps: int, warmup: float = 0.0, final: float = 0.0) -> LambdaLR:
    """Half a cosine from the optimizer's rate down to ``final`` times it.

    Args:
        steps: optimizer steps of the whole training.
        warmup: the part of them, in [0, 1), over which the rate first rises linearly from (almost) nothing.
        final: the last rate over the highest.
    """
    rise = round(warmup * steps)

    def factor(step: int) -> float:
        done = min((step - rise) / max(steps - rise, 1), 1.0)
        return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2

    return _warmed_up(optimizer, rise, factor)


def multistep(
    optimizer: Optimizer, steps: int, warmup: float = 0.0, milestones: Sequence[float] = (0.6, 0.8), gamma: float = 0.1
) -> LambdaLR:
    """Multiplies the rate by ``gamma`` at each milestone, given as a part of the training, in (0, 1)."""
    return _warmed_up(
        optimizer, round(warmup * steps), lambda step: gamma ** sum(step >= round(part * steps) for part in milestones)
    )


def constant(optimizer: Optimizer, steps: int, warmup: float = 0.0) -> LambdaLR:
    """The optimizer's rate throughout."""
    return _warmed_up(optimizer, round(warmup * steps), lambda step: 1.0)


def _warmed_up(optimizer: Optimizer, rise: int, factor: Callable[[int], float]) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: (step + 1) / (rise + 1) if step < rise else factor(step))
