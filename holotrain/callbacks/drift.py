"""DriftMonitor: how far the activations that a reversible backward rebuilds are from the true ones."""

import warnings
from typing import Any

import lightning.pytorch as pl
import torch

from holotrain.callbacks.period import period_of
from holotrain.reversible import ReversibleSequence


class DriftMonitor(pl.Callback):
    """Logs the relative reconstruction error of the input of every reversible sequence, for any Lightning Trainer.

    A sample of a few thousand entries is remembered in the forward and compared with what the backward rebuilds, in one step of
    every window; between those steps it costs nothing.

    Args:
        every_n_steps: optimizer steps a window; None: the trainer's ``log_every_n_steps``; 0: none.
        threshold: of the error, above which a warning names the remedy, once.

    Logs ``reversible/drift``: the norm of the difference over that of the sample, the largest of all sequences. Nothing where
    no sequence recomputes.
    """

    def __init__(self, every_n_steps: int | None = None, threshold: float = 1e-2) -> None:
        self.every_n_steps = every_n_steps
        self.threshold = threshold
        self._watched: list[ReversibleSequence] = []
        self._warned = False

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        window = period_of(trainer, self.every_n_steps)
        if window and (trainer.global_step + 1) % window == 0:
            self._watched = [module for module in pl_module.modules() if isinstance(module, ReversibleSequence)]
            for sequence in self._watched:
                sequence.witnesses = []

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._watched:
            return
        witnesses = [witness for sequence in self._watched for witness in sequence.witnesses]
        for sequence in self._watched:
            sequence.witnesses = None
        self._watched = []
        drifts = [witness.drift for witness in witnesses if witness.drift is not None]
        if drifts:
            drift = torch.stack(drifts).max().item()
            for logger in trainer.loggers:
                logger.log_metrics({"reversible/drift": drift}, step=trainer.global_step)
            self._warn(drift)

    def _warn(self, drift: float) -> None:
        if drift > self.threshold and not self._warned:
            self._warned = True
            warnings.warn(
                f"the activations that the reversible backward rebuilds are off by {drift:.2g} of their norm, and gradients "
                "with them: exact=True (backward.exact=true) rebuilds them bit for bit; more precise branches "
                "(trainer.precision=32-true) or fewer blocks in a row (backward.store) lessen the error",
                stacklevel=2,
            )
