"""MemoryMonitor: logs the peak memory of each phase of training."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from holotrain.callbacks.period import checked_period, period_of
from holotrain.callbacks.probe import MemoryProbe, probe_of

PHASES = ("forward_backward", "optimizer", "validation")


class MemoryMonitor(pl.Callback):
    """Logs the peak memory over windows of optimizer steps, for any Lightning Trainer.

    On a GPU it reads the caching allocator, elsewhere the resident memory of the process. The peak is reset at each phase, so
    every phase has its own peak.

    Args:
        every_n_steps: optimizer steps per window; None: the trainer's ``log_every_n_steps``; 0: measures
            over the whole training and logs nothing.

    Logs the maximum over ranks in bytes: ``memory/peak_bytes``, the highest so far; ``memory/current_bytes``;
    ``memory/reserved_bytes`` (only on a GPU); and the peaks of the window, ``memory/forward_backward_peak_bytes``,
    ``memory/optimizer_peak_bytes`` and, after each validation, ``memory/validation_peak_bytes``.

    Attributes:
        peak_bytes: the highest peak so far, of training and validation; None before the first window.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        self.every_n_steps = checked_period(every_n_steps)
        self.peak_bytes: int | None = None
        self._peaks: dict[str, int] = {}
        self._logged_step = -1
        self._probe: MemoryProbe | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._probe = probe_of(pl_module.device)
        self._logged_step = trainer.global_step

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self._probe.reset()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self._close("forward_backward")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # With accumulation most batches have a forward and a backward, but no optimizer step.
        stepped = trainer.fit_loop.epoch_loop._should_accumulate() is False
        self._close("optimizer" if stepped else "forward_backward")
        window = period_of(trainer, self.every_n_steps)
        if window and trainer.global_step % window == 0 and trainer.global_step != self._logged_step:
            self._logged_step = trainer.global_step
            self._log(trainer, pl_module.device)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._probe is not None:
            self._probe.reset()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._probe is not None:
            self._close("validation")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._peaks:
            self._log(trainer, pl_module.device)
        self._probe = None

    def _close(self, phase: str) -> None:
        self._peaks[phase] = max(self._peaks.get(phase, 0), self._probe.peak())
        self._probe.reset()

    def _log(self, trainer: pl.Trainer, device: torch.device) -> None:
        peaks, self._peaks = self._peaks, {}
        reserved = self._probe.reserved()
        row = [peaks.get(phase, 0) for phase in PHASES] + [self._probe.current(), reserved or 0]
        *by_phase, current, reserved_everywhere = _maximum_over_ranks(row, device)
        self.peak_bytes = max(self.peak_bytes or 0, *by_phase)
        scalars = {"memory/peak_bytes": self.peak_bytes, "memory/current_bytes": current}
        scalars |= {f"memory/{phase}_peak_bytes": value for phase, value in zip(PHASES, by_phase, strict=True) if value}
        if reserved is not None:
            scalars["memory/reserved_bytes"] = reserved_everywhere
        for logger in trainer.loggers if period_of(trainer, self.every_n_steps) else ():
            logger.log_metrics(scalars, step=trainer.global_step)


def _maximum_over_ranks(values: list[int], device: torch.device) -> list[int]:
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return values
    shared = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return shared.tolist()
