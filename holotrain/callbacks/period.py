"""How often a callback measures, and whether it can."""

import lightning.pytorch as pl

from holotrain.ranges import require_at_least
from holotrain.reversible import GraphedStep


def period_of(trainer: pl.Trainer, every_n_steps: int | None) -> int:
    """Optimizer steps from one logged measurement to the next: as given, or the trainer's ``log_every_n_steps``; 0: none."""
    return trainer.log_every_n_steps if every_n_steps is None else every_n_steps


def checked_period(every_n_steps: int | None) -> int | None:
    """
    Raises:
        ValueError: it is negative.
    """
    require_at_least(0, every_n_steps=every_n_steps)
    return every_n_steps


def replays(pl_module: pl.LightningModule) -> bool:
    """Whether the training step is the replay of a CUDA graph, which runs no hooks of Python's."""
    return any(isinstance(value, GraphedStep) for value in vars(pl_module).values())
