"""PaddingMonitor: how much of the batches of a training is padding."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor


class PaddingMonitor(pl.Callback):
    """Logs the share of padding in an epoch's batches, dictionaries of ``tokens`` (B, T) and ``lengths`` (B,).

    Args:
        unbucketed: the share that batches of random documents would have, logged beside it; None: unknown.

    Logs ``padding/fraction`` and ``padding/unbucketed`` at the end of each epoch, and where a training ends within one.
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
        self._tokens = self._tokens + batch["lengths"].sum()
        self._places += batch["tokens"].numel()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._places:
            return
        shares = {"padding/fraction": 1 - self._tokens / self._places}
        if self.unbucketed is not None:
            shares["padding/unbucketed"] = torch.tensor(self.unbucketed)
        pl_module.log_dict(shares, batch_size=1)
