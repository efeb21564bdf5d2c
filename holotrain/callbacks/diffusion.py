"""ErrorDiffusionMonitor: signs, dead cells and alignment of error diffusion networks."""

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from holotrain.callbacks.period import checked_period, period_of, replays
from holotrain.error_diffusion import BACKPROPAGATION, ErrorDiffusionNetwork, alignment, dead_cells, sign_violations


@dataclass
class Pass:
    """Input and output gradient of one network in the monitored step."""

    x: Tensor
    grad: Tensor | None = None


class ErrorDiffusionMonitor(pl.Callback):
    """Monitors every ErrorDiffusionNetwork of a LightningModule, for any Lightning Trainer, in one of every n steps.

    Args:
        every_n_steps: n, in optimizer steps; None: the trainer's ``log_every_n_steps``; 0: never.

    Logs, for the last batch and averaged over networks, ``error_diffusion/sign_violations`` (fraction of weights whose sign
    does not match their cells), ``error_diffusion/dead_cells`` (fraction of hidden cells that learn from no sample) and,
    unless the rule is back-propagation, ``error_diffusion/alignment`` (cosine between update and gradient descent). A
    monitored step takes about three times as long. Logs nothing if the step is replayed as a CUDA graph.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        self.every_n_steps = checked_period(every_n_steps)
        self._passes: dict[ErrorDiffusionNetwork, Pass] = {}
        self._hooks: list[Any] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self._stop()
        window = period_of(trainer, self.every_n_steps)
        if window and (trainer.global_step + 1) % window == 0 and not replays(pl_module):
            networks = [module for module in pl_module.modules() if isinstance(module, ErrorDiffusionNetwork)]
            self._hooks = [network.register_forward_hook(self._watch, with_kwargs=True) for network in networks]

    def _watch(
        self, network: ErrorDiffusionNetwork, given: tuple[Tensor, ...], named: dict[str, Tensor], outputs: Tensor
    ) -> None:
        if outputs.requires_grad:
            (x,) = (*given, *named.values())
            seen = self._passes[network] = Pass(x.detach())
            outputs.register_hook(lambda grad: setattr(seen, "grad", grad.detach()))

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        passes = [(network, seen) for network, seen in self._passes.items() if seen.grad is not None]
        self._stop()
        if not passes:
            return
        with trainer.precision_plugin.forward_context():
            found = [_figures(network, seen) for network, seen in passes]
        scalars = {f"error_diffusion/{name}": torch.stack([each[name] for each in found]).mean().item() for name in found[0]}
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=trainer.global_step + 1)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._passes = [], {}


def _figures(network: ErrorDiffusionNetwork, seen: Pass) -> dict[str, Tensor]:
    figures = {"sign_violations": sign_violations(network), "dead_cells": dead_cells(network, seen.x)}
    if network.rule != BACKPROPAGATION:
        figures["alignment"] = alignment(network, seen.x, seen.grad)
    return figures
