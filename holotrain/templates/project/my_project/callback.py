"""A callback: what else happens during a training."""

from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl


class Diary(pl.Callback):
    """Writes a line for each epoch into a file in the folder of the run.

    Args:
        metrics: logged values to write
        file: name of the file
    """

    def __init__(self, metrics: Sequence[str] = ("val/accuracy", "val/loss"), file: str = "diary.txt") -> None:
        self.metrics, self.file = metrics, file

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        logged = trainer.callback_metrics
        values = "  ".join(f"{name} {logged[name]:.4f}" for name in self.metrics if name in logged)
        if trainer.is_global_zero:
            with (Path(trainer.default_root_dir) / self.file).open("a") as diary:
                diary.write(f"epoch {trainer.current_epoch + 1}  {values}\n")
