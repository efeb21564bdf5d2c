"""Masked language modelling as a LightningModule."""

from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from holotrain.tasks.masking import IGNORED, masked
from holotrain.tasks.padding import attended
from holotrain.tasks.task import Task


class MaskedLM(Task):
    """Trains a model to tell words that were masked, other ones at every step.

    Args:
        model: tokens (B, T), mask (B, T), targets (B, T) -> mean cross-entropy of the targets that are not -100.
        mask_id: the token that masks.
        ordinary: (V,) True for words, False for special tokens, which are never masked.
        probability: of masking each word.
        options: those of :class:`~holotrain.tasks.task.Task`.

    Batches are dictionaries of ``tokens`` (B, T) and ``lengths`` (B,).

    Logs ``val/loss`` (nats a masked word) and ``val/perplexity``, the same of ``test``. There the masks are the same each time.
    """

    def __init__(self, model: nn.Module, mask_id: int, ordinary: Tensor, probability: float = 0.15, **options: Any) -> None:
        super().__init__(model, **options)
        self.mask_id = mask_id
        self.register_buffer("ordinary", ordinary, persistent=False)
        self.register_buffer("words", ordinary.nonzero().flatten(), persistent=False)
        self.probability = probability
        self.nats = nn.ModuleDict({split: MeanMetric() for split in ("val_part", "test_part")})

    @property
    def monitored(self) -> dict[str, str]:
        return {"val/loss": "min", "val/perplexity": "min"}

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.model(tokens, mask)

    def inputs(self, batch: dict[str, Tensor], generator: torch.Generator | None = None) -> tuple[Tensor, Tensor, Tensor]:
        tokens, real = batch["tokens"], attended(batch)
        shown, targets = masked(tokens, real & self.ordinary[tokens], self.mask_id, self.words, self.probability, generator)
        return shown, real, targets

    def loss(self, tokens: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        return self.model(tokens, mask, targets)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._evaluate("val", batch, batch_idx)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._evaluate("test", batch, batch_idx)

    def _evaluate(self, split: str, batch: dict[str, Tensor], batch_idx: int) -> None:
        generator = torch.Generator(batch["tokens"].device).manual_seed(batch_idx)
        tokens, mask, targets = self.inputs(batch, generator)
        self.nats[f"{split}_part"].update(self.loss(tokens, mask, targets), (targets != IGNORED).sum())

    def on_validation_epoch_end(self) -> None:
        self._report("val")

    def on_test_epoch_end(self) -> None:
        self._report("test")

    def _report(self, split: str) -> None:
        loss = self.nats[f"{split}_part"].compute()
        self.log_dict({f"{split}/loss": loss, f"{split}/perplexity": loss.exp()}, prog_bar=split == "val")
        self.nats[f"{split}_part"].reset()
