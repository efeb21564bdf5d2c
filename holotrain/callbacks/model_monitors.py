"""Monitors of one kind of model or data: reversible stacks, error diffusion networks, padded texts."""

import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from holotrain.callbacks.monitor import Monitor, log_scalars, replays
from holotrain.error_diffusion import BACKPROPAGATION, ErrorDiffusionNetwork, alignment, dead_cells, sign_violations
from holotrain.numeric import require_at_least
from holotrain.reversible import ReversibleSequence, ReversibleStack, stacks_in


class DriftMonitor(Monitor):
    """Logs the relative reconstruction error of the input of every reversible sequence, for any Lightning Trainer.

    In one of every n steps, it keeps a sample of a few thousand entries in the forward and compares it with the recomputed
    values in the backward. The other steps have no overhead.

    Args:
        every_n_steps: n, in optimizer steps; None: the trainer's ``log_every_n_steps``; 0: never.
        threshold: relative error above which a warning is shown, once.

    Logs ``reversible/drift``: the norm of the difference divided by the norm of the sample, the maximum over all sequences.
    Logs nothing if no sequence recomputes, or if the step is replayed as a CUDA graph.
    """

    def __init__(self, every_n_steps: int | None = None, threshold: float = 1e-2) -> None:
        super().__init__(every_n_steps)
        require_at_least(0, threshold=threshold)
        self.threshold = threshold
        self._watched: list[ReversibleSequence | ReversibleStack] = []
        self._warned = False

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if self.measures(trainer) and not replays(pl_module):
            found = (module for module in pl_module.modules() if isinstance(module, ReversibleSequence))
            self._watched = [*found, *stacks_in(pl_module)]
            for sequence in self._watched:
                sequence.input_checks = []

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        input_checks = [check for sequence in self._watched for check in sequence.input_checks or ()]
        for sequence in self._watched:
            sequence.input_checks = None
        self._watched = []
        drifts = [check.drift for check in input_checks if check.drift is not None]
        if not drifts:
            return
        drift = torch.stack(drifts).max().item()
        log_scalars(trainer, {"reversible/drift": drift}, trainer.global_step)
        if drift > self.threshold and not self._warned:
            self._warned = True
            warnings.warn(
                f"recomputed activations have a relative error of {drift:.2g}, so gradients are inaccurate: use exact=True "
                "(backward.exact=true) for bit-exact recomputation, or reduce the error by a higher precision "
                "(trainer.precision=32-true) or by storing more blocks (backward.store)",
                stacklevel=2,
            )


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
