"""ExactCheckpoint: a ModelCheckpoint from each of whose files training continues exactly."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint


class ExactCheckpoint(ModelCheckpoint):
    """What falls due at an epoch's last batch, or at the validation after it, waits for the epoch's end.

    From a checkpoint of those two moments Lightning (2.6) loses or repeats an epoch; from all others it continues with the
    next batch. Takes the arguments of ModelCheckpoint.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._waiting: list[Callable[[], None]] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._now_or_later(trainer, partial(super().on_train_batch_end, trainer, pl_module, outputs, batch, batch_idx))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._now_or_later(trainer, partial(super().on_validation_end, trainer, pl_module))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        while self._waiting:
            self._waiting.pop(0)()

    def _now_or_later(self, trainer: pl.Trainer, save: Callable[[], None]) -> None:
        if trainer.is_last_batch:
            self._waiting.append(save)
        else:
            save()


def last_checkpoint(path: Path, every_n_train_steps: int | None = None) -> ExactCheckpoint:
    """Overwrites one file after every epoch, or every so many optimizer steps."""
    return ExactCheckpoint(
        path.parent,
        filename=path.stem,
        enable_version_counter=False,
        every_n_train_steps=every_n_train_steps,
        save_on_train_epoch_end=every_n_train_steps is None,
    )
