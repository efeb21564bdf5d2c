"""DriftMonitor: the error of the activations that a reversible backward recomputes."""

import warnings
from typing import Any

import lightning.pytorch as pl
import torch

from holotrain.callbacks.period import checked_period, period_of, replays
from holotrain.ranges import require_at_least
from holotrain.reversible import ReversibleSequence, ReversibleStack, stacks_in


class DriftMonitor(pl.Callback):
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
        self.every_n_steps = checked_period(every_n_steps)
        require_at_least(0, threshold=threshold)
        self.threshold = threshold
        self._watched: list[ReversibleSequence | ReversibleStack] = []
        self._warned = False

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        window = period_of(trainer, self.every_n_steps)
        if window and (trainer.global_step + 1) % window == 0 and not replays(pl_module):
            found = (module for module in pl_module.modules() if isinstance(module, ReversibleSequence))
            self._watched = [*found, *stacks_in(pl_module)]
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
                f"recomputed activations have a relative error of {drift:.2g}, so gradients are inaccurate: use exact=True "
                "(backward.exact=true) for bit-exact recomputation, or reduce the error by a higher precision "
                "(trainer.precision=32-true) or by storing more blocks (backward.store)",
                stacklevel=2,
            )
