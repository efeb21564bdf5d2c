"""Causal language modelling as a LightningModule."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from holotrain.tasks.task import Task


class CausalLM(Task):
    """Trains a model to tell the next token.

    Args:
        model: tokens (B, T) -> logits (B, T, V); with ``targets`` (B, T) beside them -> their mean cross-entropy.
        token_bytes: (V,) bytes of text that each token stands for, 0 for special ones: what bits per byte are counted over.
        options: those of :class:`~holotrain.tasks.task.Task`.

    Batches are dictionaries of ``tokens`` (B, T + 1); where ``lengths`` (B,) stand beside them, what lies behind is padding.

    Logs ``val/loss`` (nats a token), ``val/perplexity`` and ``val/bits_per_byte``, the same of ``test``. A block is read
    without what came before it, so these figures are those of a context that grows from 0.
    """

    IGNORED = -100

    def __init__(self, model: nn.Module, token_bytes: Tensor, **options: Any) -> None:
        super().__init__(model, **options)
        self.register_buffer("token_bytes", token_bytes.to(torch.float32), persistent=False)
        self.nats_per_byte = nn.ModuleDict({split: MeanMetric() for split in ("val_part", "test_part")})
        self.nats_per_token = nn.ModuleDict({split: MeanMetric() for split in ("val_part", "test_part")})

    @property
    def monitored(self) -> dict[str, str]:
        return {"val/bits_per_byte": "min", "val/loss": "min", "val/perplexity": "min"}

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)

    def inputs(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        tokens = batch["tokens"]
        targets = tokens[:, 1:]
        if "lengths" in batch:
            place = torch.arange(1, tokens.shape[1], device=tokens.device)
            targets = targets.where(place < batch["lengths"][:, None], self.IGNORED)
        return tokens[:, :-1], targets

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.model(tokens, targets)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._evaluate("test", batch)

    def _evaluate(self, split: str, batch: dict[str, Tensor]) -> None:
        tokens, targets = self.inputs(batch)
        counted = targets != self.IGNORED
        count, size = counted.sum(), (self.token_bytes[targets.clamp_min(0)] * counted).sum()
        nats = self.loss(tokens, targets) * count
        self.nats_per_token[f"{split}_part"].update(nats / count, count)
        self.nats_per_byte[f"{split}_part"].update(nats / size, size)

    def on_validation_epoch_end(self) -> None:
        self._report("val")

    def on_test_epoch_end(self) -> None:
        self._report("test")

    def _report(self, split: str) -> None:
        loss, per_byte = (means[f"{split}_part"].compute() for means in (self.nats_per_token, self.nats_per_byte))
        bits = {f"{split}/bits_per_byte": per_byte / math.log(2)}
        self.log_dict({f"{split}/loss": loss, f"{split}/perplexity": loss.exp()} | bits, prog_bar=split == "val")
        for means in (self.nats_per_token, self.nats_per_byte):
            means[f"{split}_part"].reset()

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """How well each text is foretold: ``bits`` (B,) in all, ``bytes`` (B,) of text they stand for."""
        tokens, targets = self.inputs(batch)
        logits = self(tokens).float()
        bits = nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none").sum(1) / math.log(2)
        return {"bits": bits, "bytes": (self.token_bytes[targets.clamp_min(0)] * (targets != self.IGNORED)).sum(1)}
