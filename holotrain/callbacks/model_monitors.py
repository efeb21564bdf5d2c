"""Monitors of one kind of model or data: reversible stacks, error diffusion networks, padded texts."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from holotrain.callbacks.monitor import Monitor, log_scalars, replays
from holotrain.error_diffusion import ErrorDiffusionNetwork
from holotrain.error_diffusion.cells import alignment, dead_cells, sign_violations
from holotrain.error_diffusion.rules import BACKPROPAGATION
from holotrain.reversible.in_place import checks_in


class DriftMonitor(Monitor):
    """Logs how well activations are rebuilt, for any Lightning Trainer.

    Every backward of reversible blocks checks this, with a sample of a few thousand entries; see
    :mod:`holotrain.reversible.checks`, which warns where it must.

    Args:
        every_n_steps: logs one of every n optimizer steps; None: the trainer's ``log_every_n_steps``; 0: never.

    Logs ``reversible/drift``: the relative error of the rebuilt stream that the first blocks read, the maximum over all
    sequences and stacks; 0 if it is exact. Logs nothing if no sequence recomputes, or if the step is replayed as a CUDA graph.
    """

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.measures(trainer) or replays(pl_module):
            return
        errors = [error for checks in checks_in(pl_module) for error in checks.errors]
        if errors:
            log_scalars(trainer, {"reversible/drift": max(error.item() for error in errors)}, trainer.global_step)


class ErrorDiffusionMonitor(Monitor):
    """Monitors every ErrorDiffusionNetwork of a LightningModule, for any Lightning Trainer, in one of every n steps.

    Args:
        every_n_steps: n, in optimizer steps; None: the trainer's ``log_every_n_steps``; 0: never.

    Logs, for the last batch and averaged over networks, ``error_diffusion/sign_violations`` (fraction of weights whose sign
    does not match their cells), ``error_diffusion/dead_cells`` (fraction of hidden cells that learn from no sample) and,
    unless the rule is back-propagation, ``error_diffusion/alignment`` (cosine between update and gradient descent). A
    monitored step takes about three times as long. Logs nothing if the step is replayed as a CUDA graph.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        super().__init__(every_n_steps)
        self._seen: dict[ErrorDiffusionNetwork, tuple[Tensor, Tensor]] = {}  # input and gradient of the output
        self._hooks: list[Any] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self._stop()
        if self.measures(trainer) and not replays(pl_module):
            networks = [module for module in pl_module.modules() if isinstance(module, ErrorDiffusionNetwork)]
            self._hooks = [network.register_forward_hook(self._watch, with_kwargs=True) for network in networks]

    def _watch(
        self, network: ErrorDiffusionNetwork, given: tuple[Tensor, ...], named: dict[str, Tensor], outputs: Tensor
    ) -> None:
        if outputs.requires_grad:
            (x,) = (*given, *named.values())
            outputs.register_hook(lambda grad: self._seen.update({network: (x.detach(), grad.detach())}))

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        seen = self._seen
        self._stop()
        if not seen:
            return
        with trainer.precision_plugin.forward_context():
            found = []
            for network, (x, grad) in seen.items():
                figures = {"sign_violations": sign_violations(network), "dead_cells": dead_cells(network, x)}
                if network.rule != BACKPROPAGATION:
                    figures["alignment"] = alignment(network, x, grad)
                found.append(figures)
        scalars = {f"error_diffusion/{name}": torch.stack([each[name] for each in found]).mean().item() for name in found[0]}
        log_scalars(trainer, scalars, trainer.global_step + 1)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._seen = [], {}


class PaddingMonitor(pl.Callback):
    """Logs the fraction of padding in an epoch's batches, dictionaries with ``tokens`` (B, T) and ``lengths`` (B,).

    Args:
        unbucketed: the fraction for batches of random documents, logged for comparison; None: not known.

    Logs ``padding/fraction`` and ``padding/unbucketed`` at the end of each epoch and of the training. Skips other batches.
    """

    def __init__(self, unbucketed: float | None = None) -> None:
        self.unbucketed = unbucketed
        self._tokens: Tensor | int = 0
        self._places = 0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._tokens, self._places = 0, 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if isinstance(batch, dict) and {"lengths", "tokens"} <= batch.keys():
            self._tokens = self._tokens + batch["lengths"].sum()
            self._places += batch["tokens"].numel()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._places:
            return
        shares = {"padding/fraction": 1 - self._tokens / self._places}
        if self.unbucketed is not None:
            shares["padding/unbucketed"] = torch.tensor(self.unbucketed)
        pl_module.log_dict(shares, batch_size=1)
