"""ThroughputMonitor: how fast training goes, and how much of the device that uses."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.utils._pytree import tree_leaves

from holotrain.callbacks.period import period_of
from holotrain.callbacks.share import share_of
from holotrain.reversible.clock import Clock, clock_of


@dataclass
class Window:
    """A stretch of training without interruption: two instants and what was done between them."""

    start: Any
    end: Any
    step: int
    steps: int
    samples: int
    tokens: int | Tensor


class ThroughputMonitor(pl.Callback):
    """Logs samples, tokens and FLOPs a second over windows of optimizer steps, for any Lightning Trainer.

    Waiting for data counts; validation, the sanity check and what happens between epochs do not. On a GPU the time is taken
    from CUDA events, read once the GPU has passed them: nothing waits for it.

    Args:
        every_n_steps: optimizer steps a window; None: the trainer's ``log_every_n_steps``; 0: measured
            over epochs and logged nowhere.
        batch_size: samples in a batch; None: the length of the first tensor in it.
        count_tokens: tokens in a batch, a number or a tensor, which is read with the window; None: no token figures.
        model_flops_per_sample: FLOPs of one training step (forward and backward) of the model that stores everything,
            a sample. Gives MFU; recomputation never counts in it (Chowdhery et al., PaLM, 2022, appendix B).
        hardware_flops_per_sample: FLOPs that are truly computed, recomputation included. Gives HFU.
        peak_flops: FLOP/s that the device can do in the precision of the training; see
            :func:`~holotrain.callbacks.flops.peak_flops`. MFU and HFU are logged only where it is known.

    Logs ``throughput/samples_per_second`` and ``throughput/tokens_per_second`` of all ranks together,
    ``throughput/step_seconds`` an optimizer step, ``throughput/mfu`` and ``throughput/hfu`` as fractions.

    Attributes:
        samples_per_second, tokens_per_second, step_seconds: over all windows but the first, which warms up (over it too, where
            there is no other); None where nothing was measured.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        batch_size: Callable[[Any], int] | None = None,
        count_tokens: Callable[[Any], int | Tensor] | None = None,
        model_flops_per_sample: float | None = None,
        hardware_flops_per_sample: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        self.every_n_steps = every_n_steps
        self.batch_size = batch_size or first_length
        self.count_tokens = count_tokens
        self.model_flops_per_sample = model_flops_per_sample
        self.hardware_flops_per_sample = hardware_flops_per_sample
        self.peak_flops = peak_flops
        self.clock: Clock | None = None
        self._open: Window | None = None
        self._pending: list[Window] = []
        self._measured: list[tuple[Window, float]] = []
        self._ranks = 1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.clock = self.clock or clock_of(pl_module.device)
        _, self._ranks = share_of(trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(trainer.global_step)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if self._open is None:  # an epoch resumed in the middle has no on_train_epoch_start
            self._begin(trainer.global_step)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        window = self._open
        window.samples += self.batch_size(batch)
        window.tokens += self.count_tokens(batch) if self.count_tokens else 0
        window.steps = trainer.global_step - window.step
        period = period_of(trainer, self.every_n_steps)
        if period and window.steps >= period:
            self._end(trainer)
            self._begin(trainer.global_step)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking and self.clock is not None:
            self._begin(trainer.global_step)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end(trainer)
        self._read(trainer, wait=True)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self.clock is not None:
            self._read(trainer, wait=False)

    @property
    def samples_per_second(self) -> float | None:
        return self._rate(lambda window: window.samples * self._ranks)

    @property
    def tokens_per_second(self) -> float | None:
        return self._rate(lambda window: window.tokens * self._ranks) if self.count_tokens else None

    @property
    def step_seconds(self) -> float | None:
        rate = self._rate(lambda window: window.steps)
        return 1 / rate if rate else None

    def _rate(self, amount: Callable[[Window], int]) -> float | None:
        counted = self._measured[1:] or self._measured
        seconds = sum(seconds for _, seconds in counted)
        return sum(amount(window) for window, _ in counted) / seconds if seconds else None

    def _begin(self, step: int) -> None:
        self._open = Window(self.clock.mark(), None, step, 0, 0, 0)

    def _end(self, trainer: pl.Trainer) -> None:
        """Closes the open window, if a step was made in it, and logs those that the clock can tell by now."""
        window, self._open = self._open, None
        if window is not None and window.steps:
            window.end = self.clock.mark()
            window.step += window.steps
            self._pending.append(window)
        if self.clock is not None:
            self._read(trainer, wait=False)

    def _read(self, trainer: pl.Trainer, wait: bool) -> None:
        while self._pending:
            window = self._pending[0]
            seconds = self.clock.seconds(window.start, window.end, wait)
            if not seconds:
                return
            self._pending.pop(0)
            window.tokens = int(window.tokens)
            self._measured.append((window, seconds))
            for logger in trainer.loggers if period_of(trainer, self.every_n_steps) else ():
                logger.log_metrics(self._scalars(window, seconds), step=window.step)

    def _scalars(self, window: Window, seconds: float) -> dict[str, float]:
        rate = window.samples / seconds
        scalars = {
            "throughput/samples_per_second": rate * self._ranks,
            "throughput/step_seconds": seconds / window.steps,
        }
        if self.count_tokens:
            scalars["throughput/tokens_per_second"] = window.tokens / seconds * self._ranks
        for name, flops in (("mfu", self.model_flops_per_sample), ("hfu", self.hardware_flops_per_sample)):
            if flops and self.peak_flops:
                scalars[f"throughput/{name}"] = rate * flops / self.peak_flops
        return scalars


def first_length(batch: Any) -> int:
    """The length of the first tensor in a batch.

    Raises:
        ValueError: there is none.
    """
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return len(leaf)
    raise ValueError("the batch holds no tensor; give ThroughputMonitor(batch_size=...)")
