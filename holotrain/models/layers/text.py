"""What transformers for text share: token embeddings, and the blocks in plain and reversible form."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from holotrain.models.layers.branches import Branches
from holotrain.models.layers.residual import PostNormBlock, ResidualBlock, ResidualSequence
from holotrain.models.layers.streams import AveragedStreams
from holotrain.reversible import ReversibleBlock


class TokenEmbedding(nn.Module):
    """Embeds tokens and adds a learned position to each. (B, T) -> (B, T, dim).

    Args:
        vocab: number of words.
        context: the longest sequence, in tokens.
        positions: learn them; False if attention gets positions in another way.
        norm: applied to the sum, if given.

    Raises:
        ValueError: a longer sequence, at the call.
    """

    def __init__(
        self,
        vocab: int,
        context: int,
        dim: int,
        positions: bool = True,
        norm: nn.Module | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.context = context
        self.word = nn.Embedding(vocab, dim)
        self.position = nn.Parameter(torch.zeros(context, dim)) if positions else None
        self.norm = norm or nn.Identity()
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
        return self.dropout(self.norm(x))


def plain_blocks(branches: Branches, backward: str | Sequence[str], post_norm: bool = False) -> ResidualSequence:
    """The branches as residual blocks."""
    block = PostNormBlock if post_norm else ResidualBlock
    return ResidualSequence((block(f, g) for f, g in branches), backward)


def reversible_blocks(branches: Branches, **engine: Any) -> AveragedStreams:
    """The branches as reversible blocks; ``engine`` as :class:`~holotrain.reversible.ReversibleSequence` takes it.

    The streams swap after every block, so that attention reads what attention wrote. Without this, a model for text needs far
    more steps than its plain twin.
    """
    return AveragedStreams((ReversibleBlock(f, g, exchange=True) for f, g in branches), **engine)


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
