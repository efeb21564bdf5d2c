"""ThroughputMonitor: logs the speed of training and the utilization of the device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.utils._pytree import tree_leaves

from holotrain.callbacks.period import checked_period, period_of
from holotrain.callbacks.shard import shard_of
from holotrain.planning.clock import Clock, clock_of


@dataclass
class Window:
    """A period of training without interruption: its start, its end and the work done in it."""

    start: Any
    end: Any
    step: int
    steps: int
    samples: int
    tokens: int | Tensor


class ThroughputMonitor(pl.Callback):
    """Logs samples, tokens and FLOPs per second over windows of optimizer steps, for any Lightning Trainer.

    The time includes waiting for data, but not validation, the sanity check and the work between epochs. On a GPU it is
    measured with CUDA events, which are read after the GPU has passed them, so nothing waits.

    Args:
        every_n_steps: optimizer steps per window; None: the trainer's ``log_every_n_steps``; 0: measures
            over epochs and logs nothing.
        count_samples: returns the samples in a batch; None: the length of its first tensor.
        count_tokens: returns the tokens in a batch, as a number or as a tensor, which is read at the end of the window; None:
            tokens are not logged.
        model_flops_per_sample: FLOPs per sample of a training step (forward and backward) that stores everything. Used for
            MFU, which never includes recomputation (Chowdhery et al., PaLM, 2022, appendix B).
        hardware_flops_per_sample: FLOPs per sample that are computed, with recomputation. Used for HFU.
        peak_flops: peak FLOP/s of the device in the precision of the training, for MFU and HFU; in a configuration null is that
            of a known GPU. Without it, they are not logged. See :func:`~holotrain.callbacks.flops.peak_flops`.

    Logs ``throughput/samples_per_second`` and ``throughput/tokens_per_second`` over all ranks,
    ``throughput/step_seconds`` per optimizer step, ``throughput/mfu`` and ``throughput/hfu`` as fractions.

    Attributes:
        samples_per_second, tokens_per_second, step_seconds: over all windows except the first, which is a warm-up (it counts if
            it is the only one); None if nothing was measured.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        count_samples: Callable[[Any], int] | None = None,
        count_tokens: Callable[[Any], int | Tensor] | None = None,
        model_flops_per_sample: float | None = None,
        hardware_flops_per_sample: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        self.every_n_steps = checked_period(every_n_steps)
        self.count_samples = count_samples or first_length
        self.count_tokens = count_tokens
        self.model_flops_per_sample = model_flops_per_sample
        self.hardware_flops_per_sample = hardware_flops_per_sample
        if peak_flops is not None and not peak_flops > 0:
            raise ValueError(f"peak_flops {peak_flops} must be above 0")
        self.peak_flops = peak_flops
        self.clock: Clock | None = None
        self._open: Window | None = None
        self._pending: list[Window] = []
        self._measured: list[tuple[Window, float]] = []
        self._ranks = 1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.clock = self.clock or clock_of(pl_module.device)
        _, self._ranks = shard_of(trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(trainer.global_step)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if self._open is None:  # an epoch resumed in the middle has no on_train_epoch_start
            self._begin(trainer.global_step)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        window = self._open
        window.samples += self.count_samples(batch)
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
        """Closes the open window, if it has a step, and logs the windows whose time is known by now."""
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
        ValueError: the batch has no tensor.
    """
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return len(leaf)
    raise ValueError("the batch has no tensor; set ThroughputMonitor(count_samples=...)")
