"""Draws a token from the logits of the next token."""

from dataclasses import dataclass

import torch
from torch import Tensor

from holotrain.ranges import require_at_least


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. Defaults draw from the model's own distribution.

    Args:
        temperature: logits are divided by it; 0 always takes the likeliest token.
        top_k: draw among this many of the likeliest tokens; None: among all.
        top_p: draw among the fewest likeliest tokens whose probabilities reach this sum (nucleus sampling, Holtzman et al.,
            2020); None: among all. Applied after ``top_k``.

    Raises:
        ValueError: a value out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        require_at_least(0, temperature=self.temperature)
        require_at_least(1, top_k=self.top_k)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], not {self.top_p}")

    def probabilities(self, logits: Tensor) -> Tensor:
        """The probabilities (B, V) to draw from, for logits (B, V) and a temperature above 0."""
        logits = logits.float()
        temperature = max(self.temperature, torch.finfo(logits.dtype).tiny)  # what is below it would be 0
        logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature  # else a tiny temperature would overflow
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        probabilities = logits.softmax(dim=-1)
        if self.top_p is not None and self.top_p < 1:
            ordered, order = probabilities.sort(dim=-1, descending=True)
            reached_before = ordered.cumsum(dim=-1) - ordered >= self.top_p
            kept = ordered.masked_fill(reached_before, 0)
            probabilities = torch.zeros_like(probabilities).scatter(-1, order, kept / kept.sum(-1, keepdim=True))
        return probabilities

    def draw(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The next tokens, (B,), for logits (B, V).

        Raises:
            ValueError: the logits are not finite, for example because the training has diverged.
        """
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        try:
            return torch.multinomial(self.probabilities(logits), 1, generator=generator).squeeze(-1)
        except RuntimeError as error:
            if logits.isfinite().all():
                raise
            raise ValueError("the model gives NaN or infinity for the next token; its training has diverged") from error
