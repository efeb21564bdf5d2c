"""EpochLog: progress as plain lines, for output that is not a terminal."""

import logging
import sys
import time
from typing import Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar


class EpochLog(pl.Callback):
    """Prints one line per epoch, and one per validation within an epoch, so that the log of a batch job stays readable.

    A line has epoch, step, metrics and the seconds since the start of the epoch.
    """

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._started = time.monotonic()

    on_train_start = on_train_epoch_start  # which is not called for an epoch that is resumed

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        ended = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch or 0 <= trainer.max_steps <= trainer.global_step
        if not (trainer.sanity_checking or ended):  # the line of the epoch follows
            self._print(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._print(trainer)

    def _print(self, trainer: pl.Trainer) -> None:
        if not trainer.is_global_zero:
            return
        epochs = "" if trainer.max_epochs in (None, -1) else f"/{trainer.max_epochs}"
        shown = {name: value for name, value in trainer.callback_metrics.items() if name.startswith(("train/loss", "val/"))}
        figures = "  ".join(f"{name} {value.item():.4f}" for name, value in sorted(shown.items()))
        seconds = time.monotonic() - self._started
        line = f"epoch {trainer.current_epoch + 1}{epochs}  step {trainer.global_step}  {figures}  {seconds:.1f} s"
        print(line, flush=True)
        logging.getLogger("holotrain").info(line)


def progress(style: Literal["auto", "bar", "lines"] = "auto") -> pl.Callback:
    """Shows how far a training is.

    Args:
        style: bar or lines (one per epoch); auto: bar on a terminal, else lines
    """
    if style == "auto":
        style = "bar" if sys.stdout.isatty() else "lines"
    return RichProgressBar() if style == "bar" else EpochLog()
