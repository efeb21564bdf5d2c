"""What a training has measured, in its checkpoints and in its summary."""

from typing import Any

import lightning.pytorch as pl

from holotrain.callbacks import MemoryMonitor, ThroughputMonitor

KEY = "measured"
"""Where a checkpoint holds it."""

OF_THROUGHPUT = ("samples_per_second", "tokens_per_second", "step_seconds")
OF_MEMORY = ("peak_memory_bytes", "step_peak_bytes")


class Measured(pl.Callback):
    """Keeps in checkpoints what a training has measured. The summary of a resumed one is whole, even if no step was left.

    Args:
        resumed: the training goes on with the numbers of the checkpoint; otherwise it begins without any.
    """

    def __init__(self, resumed: bool) -> None:
        self.resumed = resumed
        self._before: dict[str, Any] = {}

    def results(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Fields of a summary by their names, each as it was measured last."""
        found: dict[str, Any] = {}
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
            figures = {name: value for name, value in _numbers(kept).items() if name in (*OF_THROUGHPUT, *OF_MEMORY)}
            self._before = figures | {"metrics": _numbers(kept.get("metrics"))}


def _numbers(kept: Any) -> dict[str, float]:
    """The numbers by name; a file may hold anything."""
    items = kept.items() if isinstance(kept, dict) else ()
    return {name: value for name, value in items if isinstance(name, str) and isinstance(value, int | float)}
