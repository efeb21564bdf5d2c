"""Histograms: the distribution of weights and gradients."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.optim import Optimizer

from holotrain.callbacks.period import checked_period, period_of
from holotrain.ranks.tensors import whole


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

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer) -> None:
        window, step = period_of(trainer, self.every_n_steps), trainer.global_step + 1
        boards = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        if not (window and boards and step % window == 0):
            return
        for name, parameter in pl_module.named_parameters():
            for kind, tensor in (("weights", parameter), ("gradients", parameter.grad)):
                values = finite(tensor)
                if values is not None and trainer.is_global_zero:
                    for board in boards:
                        board.experiment.add_histogram(f"{kind}/{name}", values, step)


def finite(tensor: Tensor | None) -> Any:
    """The finite values, on the CPU; None if there are none. All processes must call it if the tensor is sharded."""
    if tensor is None:
        return None
    values = whole(tensor.detach()).to_dense().cpu().float().flatten()
    values = values[values.isfinite()]
    return values if len(values) else None
