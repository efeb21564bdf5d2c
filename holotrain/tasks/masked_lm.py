"""Masked language modelling as a LightningModule."""

from typing import Any

import torch
from torch import Tensor, nn

from holotrain.models.layers.text import IGNORED
from holotrain.ranges import require_within
from holotrain.tasks.language_modelling import LanguageModelling
from holotrain.tasks.masking import masked
from holotrain.tasks.padding import attended


class MaskedLM(LanguageModelling):
    """Trains a model to predict masked words, different ones at every step.

    Args:
        model: tokens (B, T), mask (B, T), targets (B, T) -> mean cross-entropy of the targets that are not -100
        token_bytes: (V,) bytes of text that each token stands for, 0 for special tokens, which are never masked
        mask_id: the mask token
        mask_probability: probability that a word is selected; of those, 80% are masked, 10% replaced and 10% unchanged
        options: those of :class:`~holotrain.tasks.task.Task`

    Batches are dictionaries of ``tokens`` (B, T) and ``lengths`` (B,).

    Logs ``val/loss`` (nats per masked word) and ``val/perplexity``, and the same for ``test``. Evaluation always uses the same
    masks.

    Raises:
        ValueError: ``mask_probability`` outside of [0.001, 1).
    """

    SUMS = ("nats", "words")

    def __init__(
        self, model: nn.Module, token_bytes: Tensor, mask_id: int, mask_probability: float = 0.15, **options: Any
    ) -> None:
        super().__init__(model, **options)
        require_within(0.001, 1, mask_probability=mask_probability)
        self.mask_id = mask_id
        ordinary = token_bytes > 0
        self.register_buffer("ordinary", ordinary, persistent=False)
        self.register_buffer("words", ordinary.nonzero().flatten(), persistent=False)
        self.mask_probability = mask_probability

    @property
    def monitored(self) -> dict[str, str]:
        return {"val/loss": "min", "val/perplexity": "min"}

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.model(tokens, mask)

    def inputs(self, batch: dict[str, Tensor], generator: torch.Generator | None = None) -> tuple[Tensor, Tensor, Tensor]:
        tokens, real = batch["tokens"], attended(batch, self.model)
        candidates = real.to(tokens.device, non_blocking=True) & self.ordinary[tokens]
        shown, targets = masked(tokens, candidates, self.mask_id, self.words, self.mask_probability, generator)
        return shown, real, targets

    def loss(self, tokens: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        return self.model(tokens, mask, targets)

    def summed(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        generator = torch.Generator(batch["tokens"].device).manual_seed(batch_idx)
        shown, real, targets = self.inputs(batch, generator)
        count = (targets != IGNORED).sum()
        return {"nats": self.loss(shown, real, targets) * count, "words": count}

    def reported(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        loss = sums["nats"] / sums["words"]
        return {"loss": loss, "perplexity": loss.exp()}
