"""Measured: keeps in checkpoints what a training has measured, and tells its results."""

import math
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from holotrain.callbacks.memory import MemoryMonitor
from holotrain.callbacks.throughput import ThroughputMonitor

FIGURES = ("samples_per_second", "tokens_per_second", "step_seconds", "step_peak_bytes", "peak_memory_bytes", "seconds")
"""Those that checkpoints keep and the table of a sweep has, beside the metrics."""

HELPS = "a smaller optimizer.lr or a longer scheduler.warmup may help"
"""What to do about a loss that is not finite."""


class Measured(pl.Callback):
    """Keeps in checkpoints what a training has measured, so that the summary of a resumed one is whole, also without
    a further step. Logs the best value so far of the metric that selects the best checkpoint, as ``best/val/...``.

    Args:
        started: when the run began, by ``time.monotonic``.
        resumed: the training goes on with the numbers of the checkpoint; otherwise it begins without any.
        monitor: selects the best checkpoint. Its state is saved in checkpoints, so a resumed training goes on from there.
        entries: further entries of every checkpoint.

    Attributes:
        diverged: which loss is not finite, and since when; None: all were finite at the end of the last epoch.
    """

    def __init__(
        self, started: float, resumed: bool, monitor: ModelCheckpoint | None = None, entries: Mapping[str, Any] | None = None
    ) -> None:
        self.started, self.resumed, self.monitor, self.entries = started, resumed, monitor, entries or {}
        self.best: float | None = None
        self.diverged: str | None = None
        self._before: dict[str, Any] = {}

    def figures(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Seconds, memory and metrics, by the names of fields of a summary, each as it was measured last."""
        found: dict[str, Any] = {"seconds": self._before.get("seconds", 0) + time.monotonic() - self.started}
        for callback in trainer.callbacks:  # ty: ignore[missing-attribute]
            if isinstance(callback, ThroughputMonitor | MemoryMonitor):
                found |= {name: value for name in FIGURES if (value := getattr(callback, name, None)) is not None}
            if isinstance(callback, MemoryMonitor) and callback.peak_bytes is not None:
                found["peak_memory_bytes"] = callback.peak_bytes
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        return self._before | found | {"metrics": self._before.get("metrics", {}) | metrics}

    def results(self, trainer: pl.Trainer) -> dict[str, Any]:
        """The figures, and how far the training came and what stopped it."""
        epochs, is_whole = trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        found = self.figures(trainer)
        found |= {"epochs": epochs, "whole_epochs": epochs if is_whole else max(epochs - 1, 0), "steps": trainer.global_step}
        for callback in _early_stopping(trainer):
            if callback.stopped_epoch or callback.wait_count >= callback.patience:
                found.setdefault("early_stopping_patience", callback.patience)
        for timer in [each for each in trainer.callbacks if isinstance(each, Timer)]:  # ty: ignore[missing-attribute]
            if (left := timer.time_remaining()) is not None and left <= 0:
                found["max_time"] = str(timedelta(seconds=round(timer.time_elapsed() + left)))
        if self.monitor is not None:
            best = self.best_so_far()
            found["metrics"][f"best/{self.monitor.monitor}"] = math.nan if best is None else best
        return found

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint.update(self.entries, measured=self.figures(trainer))

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        kept = checkpoint.get("measured")
        if self.resumed and isinstance(kept, dict):  # a file may hold anything
            self._before = {name: value for name, value in _numbers(kept).items() if name in FIGURES}
            self._before["metrics"] = _numbers(kept.get("metrics"))

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._patience = {callback: callback.patience for callback in _early_stopping(trainer)}

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


def _early_stopping(trainer: pl.Trainer) -> list[EarlyStopping]:
    return [callback for callback in trainer.callbacks if isinstance(callback, EarlyStopping)]  # ty: ignore[missing-attribute]


def _numbers(kept: Any) -> dict[str, float]:
    items = kept.items() if isinstance(kept, dict) else ()
    return {name: value for name, value in items if isinstance(name, str) and isinstance(value, int | float)}
