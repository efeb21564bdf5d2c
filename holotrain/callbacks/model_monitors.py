"""Monitors of one kind of model or data: reversible sequences, error diffusion networks, padded texts."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from holotrain.callbacks.monitor import Monitor, log_scalars, replays
from holotrain.error_diffusion import ErrorDiffusionNetwork
from holotrain.error_diffusion.cells import alignment, dead_cells, sign_violations
from holotrain.error_diffusion.rules import BACKPROPAGATION
from holotrain.reversible.sequence import checks_in


class DriftMonitor(Monitor):
    """Logs how well activations are rebuilt, for any Lightning Trainer.

    Every backward of reversible blocks checks this, with a sample of a few thousand entries; see
    :mod:`holotrain.reversible.checks`, which warns where it must.

    Args:
        every_n_steps: logs one of every n optimizer steps; None: the trainer's ``log_every_n_steps``; 0: never.

    Logs ``reversible/drift``: the relative error of the rebuilt stream that the first blocks read, the maximum over all
    sequences; 0 if it is exact. Logs nothing if no sequence recomputes, or if the step is replayed as a CUDA graph.
    """

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.measures(trainer) or replays(pl_module):
            return
        errors = [error for checks in checks_in(pl_module) for error in checks.errors]
        if errors:
            log_scalars(trainer, {"reversible/drift": max(error.item() for error in errors)}, trainer.global_step)


STOPPED = 20
"""Optimizer steps without any change of a weight, after which updates count as stopped."""


class ErrorDiffusionMonitor(Monitor):
    """Monitors every ErrorDiffusionNetwork of a LightningModule, for any Lightning Trainer, in one of every n steps.

    Args:
        every_n_steps: n, in optimizer steps; None: the trainer's ``log_every_n_steps``; 0: never.

    Logs, for the last batch and averaged over networks, ``error_diffusion/sign_violations`` (fraction of weights whose sign
    does not match their cells), ``error_diffusion/dead_cells`` (fraction of hidden cells that learn from no sample) and,
    unless the rule is back-propagation, ``error_diffusion/alignment`` (cosine between update and gradient descent). A
    monitored step takes about three times as long. Logs nothing if the step is replayed as a CUDA graph.

    Warns once if the updates have stopped: no weight has changed in the last 20 steps (where the outputs equal the targets,
    in a whole epoch), and none would change at a learning rate of 1. The fraction of dead cells is no reason.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        super().__init__(every_n_steps)
        self._changed: tuple[Tensor, int] | None = None  # checksums of the weights, and the step that saw them first
        self._warned = False
        self._seen: dict[ErrorDiffusionNetwork, tuple[Tensor, Tensor]] = {}  # input and gradient of the output
        self._hooks: list[Any] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self._stop()
        if self.measures(trainer) and not replays(pl_module):
            self._hooks = [network.register_forward_hook(self._watch, with_kwargs=True) for network in networks_in(pl_module)]

    def _watch(
        self, network: ErrorDiffusionNetwork, given: tuple[Tensor, ...], named: dict[str, Tensor], outputs: Tensor
    ) -> None:
        if outputs.requires_grad:
            (x,) = (*given, *named.values())
            outputs.register_hook(lambda grad: self._seen.update({network: (x.detach(), grad.detach())}))

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        seen = self._seen
        self._stop()
        if self.measures(trainer) and not self._warned:
            self._warn_if_stopped(trainer, pl_module, any(grad.any() for _, grad in seen.values()) if seen else None)
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

    def _warn_if_stopped(self, trainer: pl.Trainer, pl_module: pl.LightningModule, errors: bool | None) -> None:
        parameters = [parameter for network in networks_in(pl_module) for parameter in network.parameters()]
        learning = [(each.detach(), each.grad) for each in parameters if each.grad is not None]
        if not learning:
            return
        sums, step = torch.stack([weight.hash_tensor() for weight, _ in learning]), trainer.global_step
        if self._changed is None or not sums.equal(self._changed[0]):
            self._changed = sums, step
            return
        # One batch without a mistake has no update either; an epoch of such batches will not have one again.
        needed = STOPPED if errors else max(STOPPED, trainer.num_training_batches / trainer.accumulate_grad_batches)
        # At a learning rate of 1, so that a schedule that ends near 0 is not taken for it.
        if step - self._changed[1] >= needed and all((weight - grad).equal(weight) for weight, grad in learning):
            self._warned = True
            rank_zero_warn(f"{stopped(errors, self._changed[1])}; {HELPS}")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._changed, self._warned = None, False

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._seen = [], {}


HELPS = "fewer layers (model.depth), model.rule=kaneko or other initial weights (model.initialization=scaled) may help"


def stopped(errors: bool | None, step: int) -> str:
    """Says so; ``errors``: whether outputs of the last batch differ from their targets, None if that is not known."""
    reasons = {
        True: ", although outputs differ from their targets",
        False: ", and outputs equal their targets exactly",
        None: "",
    }
    return f"error diffusion: no weight has changed since step {step}{reasons[errors]}: saturated cells learn nothing more"


def networks_in(pl_module: pl.LightningModule) -> list[ErrorDiffusionNetwork]:
    return [module for module in pl_module.modules() if isinstance(module, ErrorDiffusionNetwork)]
