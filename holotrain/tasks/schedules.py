"""Learning-rate schedules over a known number of optimizer steps, each after a linear warm-up."""

from collections.abc import Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, MultiStepLR, SequentialLR


def cosine(optimizer: Optimizer, steps: int, warmup: float = 0.0, final: float = 0.0) -> LRScheduler:
    """Half a cosine from the optimizer's rate down to ``final`` times it.

    Args:
        steps: optimizer steps of the whole training.
        warmup: the part of them, in [0, 1), over which the rate first rises linearly from (almost) nothing.
        final: the last rate over the highest.
    """
    rest = steps - _warmup_steps(steps, warmup)
    return _warmed_up(optimizer, steps, warmup, CosineAnnealingLR(optimizer, rest, final * optimizer.param_groups[0]["lr"]))


def multistep(
    optimizer: Optimizer, steps: int, warmup: float = 0.0, milestones: Sequence[float] = (0.6, 0.8), gamma: float = 0.1
) -> LRScheduler:
    """Multiplies the rate by ``gamma`` at each milestone, given as a part of the training, in (0, 1)."""
    skipped = _warmup_steps(steps, warmup)
    at = [max(round(part * steps) - skipped, 1) for part in milestones]
    return _warmed_up(optimizer, steps, warmup, MultiStepLR(optimizer, at, gamma))


def constant(optimizer: Optimizer, steps: int, warmup: float = 0.0) -> LRScheduler:
    """The optimizer's rate throughout."""
    return _warmed_up(optimizer, steps, warmup, ConstantLR(optimizer, factor=1.0, total_iters=0))


def _warmup_steps(steps: int, warmup: float) -> int:
    return min(round(warmup * steps), steps - 1)


def _warmed_up(optimizer: Optimizer, steps: int, warmup: float, schedule: LRScheduler) -> LRScheduler:
    length = _warmup_steps(steps, warmup)
    if length == 0:
        return schedule
    rise = LinearLR(optimizer, start_factor=1 / (length + 1), total_iters=length)
    return SequentialLR(optimizer, [rise, schedule], milestones=[length])
