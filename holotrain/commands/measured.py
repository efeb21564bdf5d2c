"""What a training has measured, in its checkpoints and in its summary."""

import math
import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from holotrain.callbacks import MemoryMonitor, ThroughputMonitor

KEY = "measured"
"""Where a checkpoint holds it."""

OF_THROUGHPUT = ("samples_per_second", "tokens_per_second", "step_seconds")
OF_MEMORY = ("peak_memory_bytes", "step_peak_bytes")


HELPS = "a smaller optimizer.lr or a longer scheduler.warmup may help"
"""What to do about a loss that is not finite."""


class Measured(pl.Callback):
    """Keeps in checkpoints what a training has measured. The summary of a resumed one is whole, even if no step was left. Logs
    the best value so far of the metric that selects the best checkpoint, as ``best/val/...``.

    Args:
        started: when the run began, by ``time.monotonic``.
        resumed: the training goes on with the numbers of the checkpoint; otherwise it begins without any.
        monitor: selects the best checkpoint. Its state is saved in checkpoints, so a resumed training goes on from there.

    Attributes:
        diverged: which loss is not finite, and since when; None: all were finite at the end of the last epoch.
    """

    def __init__(self, started: float, resumed: bool, monitor: ModelCheckpoint | None = None) -> None:
        self.started, self.resumed, self.monitor = started, resumed, monitor
        self.best: float | None = None
        self.diverged: str | None = None
        self._before: dict[str, Any] = {}

    def results(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Fields of a summary by their names, each as it was measured last."""
        found: dict[str, Any] = {"seconds": self._before.get("seconds", 0) + time.monotonic() - self.started}
        for callback in trainer.callbacks:  # ty: ignore[missing-attribute]
            if isinstance(callback, ThroughputMonitor):
                found |= {name: getattr(callback, name) for name in OF_THROUGHPUT}
            elif isinstance(callback, MemoryMonitor):
                found |= dict(zip(OF_MEMORY, (callback.peak_bytes, callback.step_peak_bytes), strict=True))
        found = {name: value for name, value in found.items() if value is not None}
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        return self._before | found | {"metrics": self._before.get("metrics", {}) | metrics}

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[KEY] = self.results(trainer)

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.resumed and isinstance(kept := checkpoint.get(KEY), dict):
            figures = {name: value for name, value in _numbers(kept).items() if name in ("seconds", *OF_THROUGHPUT, *OF_MEMORY)}
            self._before = figures | {"metrics": _numbers(kept.get("metrics"))}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        stopping = (each for each in trainer.callbacks if isinstance(each, EarlyStopping))  # ty: ignore[missing-attribute]
        self._patience = {callback: callback.patience for callback in stopping}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for callback, patience in self._patience.items():
            callback.patience = patience  # as configured now: Lightning has loaded that of the checkpoint

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        losses = {name: float(trainer.callback_metrics.get(name, 0.0)) for name in ("train/loss", "val/loss")}
        wrong = next((name for name, value in losses.items() if not math.isfinite(value)), None)
        if wrong is None:
            self.diverged = None
        elif self.diverged is None:
            self.diverged = f"{wrong} is {losses[wrong]} since epoch {trainer.current_epoch + 1}"
            rank_zero_warn(f"{self.diverged}; {HELPS}")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking or self.monitor is None:
            return
        self.best = self.best_so_far(trainer.callback_metrics.get(self.monitor.monitor))
        if self.best is not None:
            for logger in trainer.loggers:
                logger.log_metrics({f"best/{self.monitor.monitor}": self.best}, step=trainer.global_step)

    def best_so_far(self, latest: Tensor | None = None) -> float | None:
        """The best finite value of the metric, that of an earlier part of the training and the latest included; None: there is
        none."""
        assert self.monitor is not None
        known = [value for value in (self.best, self.monitor.best_model_score, latest) if value is not None]
        finite = [float(value) for value in known if math.isfinite(value)]
        return (max if self.monitor.mode == "max" else min)(finite, default=None)


def _numbers(kept: Any) -> dict[str, float]:
    """The numbers by name; a file may hold anything."""
    items = kept.items() if isinstance(kept, dict) else ()
    return {name: value for name, value in items if isinstance(name, str) and isinstance(value, int | float)}
