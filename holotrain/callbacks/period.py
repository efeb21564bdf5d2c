"""How often a callback measures."""

import lightning.pytorch as pl


def period_of(trainer: pl.Trainer, every_n_steps: int | None) -> int:
    """Optimizer steps from one logged measurement to the next: as given, or the trainer's ``log_every_n_steps``; 0: none."""
    return trainer.log_every_n_steps if every_n_steps is None else every_n_steps
