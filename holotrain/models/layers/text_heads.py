"""Heads for masked words and for classes.

Each takes the encoding (B, T, C), the embedding's weight (V, C), to which the head for words is tied, and optional targets.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holotrain.models.layers.cross_entropy import IGNORED, linear_cross_entropy


class MaskedWordHead(nn.Module):
    """Linear, GELU, LayerNorm, then the transposed embedding and a bias for each word: RoBERTa's language-modelling head."""

    def __init__(self, dim: int, vocab: int) -> None:
        super().__init__()
        self.dense = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim, eps=1e-5)
        self.bias = nn.Parameter(torch.zeros(vocab))

    def forward(self, hidden: Tensor, words: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (B, T, V), or the mean cross-entropy over the targets that are not ignored; 0 if all are."""
        if targets is not None:
            counted = targets != IGNORED
            hidden, targets = hidden[counted], targets[counted]  # the others need no logits
        hidden = self.norm(F.gelu(self.dense(hidden)))
        if targets is None:
            return F.linear(hidden, words, self.bias)
        if not len(targets):
            return hidden.sum()
        return linear_cross_entropy(hidden, words, targets, self.bias)


class ClassHead(nn.Module):
    """RoBERTa's classification head on the first token: Linear, tanh, Linear, with dropout before each Linear."""

    def __init__(self, dim: int, classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dense = nn.Linear(dim, dim)
        self.classify = nn.Linear(dim, classes)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, words: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (B, classes), or their mean cross-entropy."""
        x = torch.tanh(self.dense(self.dropout(hidden[:, 0])))
        logits = self.classify(self.dropout(x))
        return logits if targets is None else F.cross_entropy(logits, targets)
