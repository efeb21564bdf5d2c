"""MemoryMonitor: logs the memory of each phase of training."""

from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from holotrain.callbacks.monitors import Monitor, log_scalars
from holotrain.checkpoints.exact_resume import has_peers
from holotrain.models.block_schedules import has_compiled_blocks
from holotrain.optimizers.low_bit import parts_of
from holotrain.planning.memory_tracker import Probe, probe_of
from holotrain.planning.tracker import AllocationTracker
from holotrain.planning.training_step import state_of

PHASES = ("forward_backward", "optimizer", "validation")
TRACKED_STEPS = 2
"""The first has what is only made in the first batch, the second the states of the optimizer."""
MARKS = ("forward", "backward", "step", "validation")


class MemoryMonitor(Monitor):
    """Logs the memory over windows of optimizer steps, for any Lightning Trainer.

    On a GPU it reads the caching allocator, elsewhere the resident memory of the process. The peak is reset at each phase, so
    every phase has its own peak.

    Args:
        every_n_steps: optimizer steps per window; None: the trainer's ``log_every_n_steps``; 0: measures
            over the whole training and logs nothing.

    Logs the maximum over ranks in MiB: ``memory/peak_MiB``, the highest so far; ``memory/step_peak_MiB``, see below;
    ``memory/current_MiB``; ``memory/reserved_MiB`` (only on a GPU); and the peaks of the window,
    ``memory/forward_backward_peak_MiB``, ``memory/optimizer_peak_MiB`` and, after each validation,
    ``memory/validation_peak_MiB``. Also what is in use after the last forward, backward, optimizer step and validation:
    ``memory/forward_MiB``, ``memory/backward_MiB``, ``memory/step_MiB`` and ``memory/validation_MiB``.

    Attributes:
        peak_bytes: the highest peak so far, of training and validation; None before the first window.
        step_peak_bytes: the most bytes of weights, gradients, optimizer state, batch and activations that a step holds at once.
            On a GPU the allocator's peak; on a CPU tracked in the first two steps, as a plan counts them. There it
            is None for compiled models, and where several processes train.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        super().__init__(every_n_steps)
        self.peak_bytes: int | None = None
        self.step_peak_bytes: int | None = None
        self._steps_begun = 0
        self._tracked: ExitStack | None = None
        self._peaks: dict[str, int] = {}
        self._used: dict[str, int] = {}
        self._logged_step = -1
        self._training = False
        self._probe: Probe

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._probe = probe_of(pl_module.device)
        self._training = True
        self._logged_step = trainer.global_step

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self._probe.reset()
        if self._tracked is None and self._steps_begun < TRACKED_STEPS and pl_module.device.type == "cpu":
            self._steps_begun += 1
            if not has_peers() and not has_compiled_blocks(pl_module):
                self._track(pl_module, trainer.optimizers, batch)

    def _track(self, model: nn.Module, optimizers: list[Optimizer], batch: Any) -> None:
        """Tracks tensors until :meth:`_end_tracking`."""
        weights = [*model.parameters(), *model.buffers()]
        by_kind = {
            "parameters": weights,
            "gradients": [weight.grad for weight in weights],
            "optimizer": [state for optimizer in optimizers for state in state_of(optimizer)],
            "batch": tree_leaves(batch),
        }
        tracker = AllocationTracker()
        for kind, tensors in by_kind.items():
            tracker.label(kind, [part for each in tensors if isinstance(each, Tensor) for part in parts_of(each)])
        self._tracked = ExitStack()
        self._tracked.callback(self._note_peak, tracker)
        self._tracked.enter_context(tracker.tracking())

    def _note_peak(self, tracker: AllocationTracker) -> None:
        self.step_peak_bytes = max(self.step_peak_bytes or 0, tracker.peak())
        tracker.events.clear()

    def _end_tracking(self) -> None:
        tracked, self._tracked = self._tracked, None
        if tracked is not None:
            tracked.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._end_tracking()

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        if self.measures(trainer):
            self._used["forward"] = self._probe.current()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self._close("forward_backward", "backward")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # With accumulation most batches have a forward and a backward, but no optimizer step.
        if trainer.fit_loop.epoch_loop._should_accumulate():
            self._close("forward_backward", "backward")
        else:
            self._close("optimizer", "step")
            self._end_tracking()
        if self.ends_window(trainer, trainer.global_step) and trainer.global_step != self._logged_step:
            self._logged_step = trainer.global_step
            self._log(trainer, pl_module.device)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_tracking()  # in the middle of an accumulation
        if self._training:
            self._probe.reset()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._training:
            self._close("validation", "validation")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_tracking()
        if self._peaks:
            self._log(trainer, pl_module.device)
        self._training = False

    def _close(self, phase: str, mark: str) -> None:
        peak, self._used[mark] = self._probe.read()
        self._peaks[phase] = max(self._peaks.get(phase, 0), peak)
        self._probe.reset()

    def _log(self, trainer: pl.Trainer, device: torch.device) -> None:
        peaks = {f"{phase}_peak": self._peaks.get(phase, 0) for phase in PHASES}
        found = peaks | {mark: self._used.get(mark, 0) for mark in MARKS}
        found |= {"current": self._probe.current(), "reserved": self._probe.reserved()}
        if has_peers():  # not by strategy.reduce, which has a barrier before it
            values = torch.tensor([*found.values()], device=device)
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
            found = dict(zip(found, values.tolist(), strict=True))
        self._peaks = {}
        self.peak_bytes = max(self.peak_bytes or 0, *(found[name] for name in peaks))
        sizes = {"peak": self.peak_bytes} | {name: size for name, size in found.items() if size}
        if device.type == "cuda":
            of_steps = max(found["forward_backward_peak"], found["optimizer_peak"])
            self.step_peak_bytes = max(self.step_peak_bytes or 0, of_steps)
        if self.step_peak_bytes is not None:
            sizes["step_peak"] = self.step_peak_bytes
        if self.period(trainer):
            scalars = {f"memory/{name}_MiB": size / 2**20 for name, size in sizes.items()}
            log_scalars(trainer, scalars, trainer.global_step)
