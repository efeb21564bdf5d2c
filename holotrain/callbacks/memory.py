"""MemoryMonitor: logs the memory of each phase of training, and warns of a leak."""

import warnings
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from holotrain.callbacks.growth import Growth
from holotrain.callbacks.period import checked_period, period_of
from holotrain.callbacks.probe import MemoryProbe, probe_of

PHASES = {"forward_backward": "forward and backward", "optimizer": "the optimizer step", "validation": "validation"}
BETWEEN = "data loading and callbacks"
MARKS = ("forward", "backward", "step", "validation")


class MemoryMonitor(pl.Callback):
    """Logs the memory over windows of optimizer steps, for any Lightning Trainer, and warns once if it grows step by step.

    On a GPU it reads the caching allocator, elsewhere the resident memory of the process. The peak is reset at each phase, so
    every phase has its own peak.

    Args:
        every_n_steps: optimizer steps per window; None: the trainer's ``log_every_n_steps``; 0: measures
            over the whole training and logs nothing.

    Logs the maximum over ranks in bytes: ``memory/peak_bytes``, the highest so far; ``memory/current_bytes``;
    ``memory/reserved_bytes`` (only on a GPU); and the peaks of the window, ``memory/forward_backward_peak_bytes``,
    ``memory/optimizer_peak_bytes`` and, after each validation, ``memory/validation_peak_bytes``. Also what is in use after the
    last forward, backward, optimizer step and validation: ``memory/forward``, ``memory/backward``, ``memory/step`` and
    ``memory/validation``.

    The warning names the phase that keeps most of the growth: forward and backward, the optimizer step, validation, or data
    loading and callbacks (callbacks in front of this one count as the phase before). The first check is after 24 steps; each
    later one looks at a longer time: the slower a leak, the later it is found.

    Attributes:
        peak_bytes: the highest peak so far, of training and validation; None before the first window.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        self.every_n_steps = checked_period(every_n_steps)
        self.peak_bytes: int | None = None
        self._peaks: dict[str, int] = {}
        self._used: dict[str, int] = {}
        self._growth: Growth | None = None
        self._warned = False
        self._logged_step = -1
        self._probe: MemoryProbe | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._probe = probe_of(pl_module.device)
        self._growth = Growth()
        self._logged_step = trainer.global_step

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self._growth.mark("between", self._probe.current())
        self._probe.reset()

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        if self._due(trainer, trainer.global_step + 1):
            self._used["forward"] = self._probe.current()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self._close("forward_backward", "backward")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # With accumulation most batches have a forward and a backward, but no optimizer step.
        stepped = trainer.fit_loop.epoch_loop._should_accumulate() is False
        if stepped:
            self._close("optimizer", "step")
            self._warn()
        else:
            self._close("forward_backward", "backward")
        if self._due(trainer, trainer.global_step) and trainer.global_step != self._logged_step:
            self._logged_step = trainer.global_step
            self._log(trainer, pl_module.device)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._probe is not None:
            self._growth.mark("between", self._probe.current())
            self._probe.reset()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._probe is not None:
            self._close("validation", "validation")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._peaks:
            self._log(trainer, pl_module.device)
        self._probe = None

    def _due(self, trainer: pl.Trainer, step: int) -> bool:
        window = period_of(trainer, self.every_n_steps)
        return bool(window) and step % window == 0

    def _close(self, phase: str, mark: str) -> None:
        peak, self._used[mark] = self._probe.peak_and_current()
        self._peaks[phase] = max(self._peaks.get(phase, 0), peak)
        self._growth.mark(phase, self._used[mark])
        self._probe.reset()

    def _warn(self) -> None:
        found = self._growth.step()
        if found is not None and not self._warned:
            self._warned = True
            phase, rate = found
            warnings.warn(
                f"memory grows by {rate / 2**20:.2g} MiB a step, most of it in {PHASES.get(phase, BETWEEN)}: something keeps "
                "tensors or objects of past steps, for example a list of losses that are not detached",
                stacklevel=2,
            )

    def _log(self, trainer: pl.Trainer, device: torch.device) -> None:
        peaks = {f"memory/{phase}_peak_bytes": self._peaks.get(phase, 0) for phase in PHASES}
        found = peaks | {f"memory/{mark}": self._used.get(mark, 0) for mark in MARKS}
        found |= {"memory/current_bytes": self._probe.current(), "memory/reserved_bytes": self._probe.reserved() or 0}
        found = dict(zip(found, _maximum_over_ranks(list(found.values()), device), strict=True))
        self._peaks = {}
        self.peak_bytes = max(self.peak_bytes or 0, *(found[name] for name in peaks))
        scalars = {"memory/peak_bytes": self.peak_bytes} | {name: value for name, value in found.items() if value}
        for logger in trainer.loggers if period_of(trainer, self.every_n_steps) else ():
            logger.log_metrics(scalars, step=trainer.global_step)


def _maximum_over_ranks(values: list[int], device: torch.device) -> list[int]:
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return values
    shared = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return shared.tolist()
