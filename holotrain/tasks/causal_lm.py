"""Causal language modelling as a LightningModule."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holotrain.models.layers.text import IGNORED
from holotrain.tasks.language_modelling import LanguageModelling


class CausalLM(LanguageModelling):
    """Trains a model to predict the next token.

    Args:
        model: tokens (B, T) -> logits (B, T, V); with ``targets`` (B, T) in addition -> their mean cross-entropy
        token_bytes: (V,) bytes of text that each token stands for, 0 for special tokens, to compute bits per byte
        options: those of :class:`~holotrain.tasks.task.Task`

    Batches are dictionaries of ``tokens`` (B, T + 1) and optionally ``lengths`` (B,); tokens after a row's length are padding.

    Logs ``val/loss`` (nats per token), ``val/perplexity`` and ``val/bits_per_byte``, and the same for ``test``. A block is
    read without the text before it, so these are the figures of a context that grows from 0.
    """

    SUMS = ("nats", "tokens", "bytes")

    def __init__(self, model: nn.Module, token_bytes: Tensor, **options: Any) -> None:
        super().__init__(model, **options)
        self.register_buffer("token_bytes", token_bytes.to(torch.float32), persistent=False)

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
            targets = targets.where(place < batch["lengths"][:, None], IGNORED)
        return tokens[:, :-1], targets

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.model(tokens, targets)

    def terms(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return (targets != IGNORED).sum()

    def summed(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        tokens, targets = self.inputs(batch)
        count = self.terms(tokens, targets)
        return {"nats": self.loss(tokens, targets) * count, "tokens": count, "bytes": self._bytes(targets).sum()}

    def reported(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        loss = sums["nats"] / sums["tokens"]
        return {"loss": loss, "perplexity": loss.exp(), "bits_per_byte": sums["nats"] / sums["bytes"] / math.log(2)}

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """The cost of each text under the model: total ``bits`` (B,), and the ``bytes`` (B,) of text."""
        tokens, targets = self.inputs(batch)
        # Text by text: the logits of a batch over a long vocabulary would take gigabytes.
        nats = [
            F.cross_entropy(self(row[None])[0].float(), wanted, reduction="sum")
            for row, wanted in zip(tokens, targets, strict=True)
        ]
        return {"bits": torch.stack(nats) / math.log(2), "bytes": self._bytes(targets).sum(1)}

    def _bytes(self, targets: Tensor) -> Tensor:
        """The bytes of each target, (B, T); 0 for ignored ones."""
        return self.token_bytes[targets.clamp_min(0)] * (targets != IGNORED)
