"""PaddingMonitor: the fraction of padding in training batches."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor


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
