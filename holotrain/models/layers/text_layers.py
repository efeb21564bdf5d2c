"""What transformers for text share: token embeddings and their first values. Shapes: B batch, T tokens."""

import torch
from torch import Tensor, nn


class TokenEmbedding(nn.Module):
    """Embeds tokens and adds a learned position to each. (B, T) -> (B, T, dim).

    Args:
        vocab: number of words.
        context: the longest sequence, in tokens.
        positions: learn them; False if attention gets positions in another way.

    Raises:
        ValueError: a longer sequence, at the call.
    """

    def __init__(self, vocab: int, context: int, dim: int, positions: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.context = context
        self.word = nn.Embedding(vocab, dim)
        self.position = nn.Parameter(torch.zeros(context, dim)) if positions else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """
        Args:
            positions: (B, T), of each token; None: 0, 1, 2, ...
        """
        if tokens.shape[1] > self.context:
            raise ValueError(f"the model reads up to {self.context} tokens at once, not {tokens.shape[1]}")
        x = self.word(tokens)
        if self.position is not None:
            x = x + (self.position[: tokens.shape[1]] if positions is None else self.position[positions])
        return self.dropout(x)


def initialise(model: nn.Module, depth: int) -> None:
    """Normal of 0.02, biases zero; in the last layer of each branch divided by sqrt(2 depth), as in GPT-2."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            ends_a_branch = name.rpartition(".")[2] in ("project", "narrow")
            nn.init.normal_(module.weight, std=0.02 / (2 * depth) ** 0.5 if ends_a_branch else 0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, TokenEmbedding):
            nn.init.normal_(module.word.weight, std=0.02)
            if module.position is not None:
                nn.init.normal_(module.position, std=0.02)
