"""Histograms: the distribution of weights and gradients."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from holotrain.callbacks.period import checked_period, period_of
from holotrain.optimizers import InBackward


class Histograms(pl.Callback):
    """Logs histograms of every weight and gradient to TensorBoard in one of every n optimizer steps, for any Lightning Trainer.

    A logged step copies all weights and gradients to the CPU, one after another. Other loggers get nothing.

    Args:
        every_n_steps: n; None: the trainer's ``log_every_n_steps``; 0: never.

    Logs ``weights/<name>`` and ``gradients/<name>``, before clipping and the optimizer step. NaN and infinity are left out.
    With 16-mixed and a fused optimizer, gradients are scaled. Error diffusion has updates in place of gradients.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        self.every_n_steps = checked_period(every_n_steps)
        self._written: set[Tensor] = set()
        self._watch: RemovableHandle | None = None

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._forget()
        optimizer = InBackward.among(trainer.optimizers)
        if optimizer is not None and self._boards(trainer):
            names = {parameter: name for name, parameter in pl_module.named_parameters()}
            self._watch = optimizer.observe(lambda each: each in names and self._write(trainer, names[each], each))

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer) -> None:
        if self._boards(trainer):
            for name, parameter in pl_module.named_parameters():
                if parameter not in self._written:
                    self._write(trainer, name, parameter)
        self._forget()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._forget()

    def _boards(self, trainer: pl.Trainer) -> list[TensorBoardLogger]:
        """The loggers, in a step that is logged."""
        window = period_of(trainer, self.every_n_steps)
        due = window and (trainer.global_step + 1) % window == 0
        return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)] if due else []

    def _write(self, trainer: pl.Trainer, name: str, parameter: Tensor) -> None:
        self._written.add(parameter)
        for kind, tensor in (("weights", parameter), ("gradients", parameter.grad)):
            values = finite(tensor)
            if values is not None and trainer.is_global_zero:
                for board in self._boards(trainer):
                    board.experiment.add_histogram(f"{kind}/{name}", values, trainer.global_step + 1)

    def _forget(self) -> None:
        self._written = set()
        if self._watch is not None:
            self._watch.remove()
            self._watch = None


def finite(tensor: Tensor | None) -> Any:
    """The finite values, on the CPU; None if there are none. All processes must call it if the tensor is sharded."""
    if tensor is None or tensor.is_meta:  # of another pipeline stage
        return None
    tensor = tensor.detach()
    values = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).to_dense().cpu().float().flatten()
    values = values[values.isfinite()]
    return values if len(values) else None
