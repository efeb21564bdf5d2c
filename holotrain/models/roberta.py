"""RoBERTa (Liu et al., 2019), a text encoder, and Rev-RoBERTa, with a head for masked words or for classes.

The published model is post-norm: a block normalises after the addition. A reversible block needs pre-norm branches, because
normalised streams cannot be rebuilt. So Rev-RoBERTa and its twin are pre-norm. The number of parameters is the published one:
post-norm normalises the embedding, pre-norm the final output.
Shapes: B batch, T tokens, C channels, V words.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holotrain.models.layers.blocks import (
    AveragedStreams,
    Divisible,
    ResidualSequence,
    Reversible,
    as_streams,
    make_sequences,
    transformer_branches,
)
from holotrain.models.layers.packing import padding_context
from holotrain.models.layers.text_layers import TokenEmbedding, initialise
from holotrain.reversible.tiled_loss import IGNORED, linear_cross_entropy


class RoBERTa(Divisible, nn.Module):
    """The plain encoder.

    Args:
        vocab: V, number of words
        context: the longest sequence, in tokens
        classes: number of classes for a classification head on the first token; null: a head for masked words
        dim: embedding width
        depth: number of blocks
        heads: number of attention heads; must divide dim
        mlp_ratio: width of the MLP's hidden layer divided by dim
        dropout: dropout of the embedding, the attention output, the MLP and the head for classes
        attention_dropout: dropout of the attention weights; above 0, training on a CPU has no fused attention and is slower
        drop_path: stochastic depth rate of the last block; it rises linearly from 0 at the first block
        backward: store the activations of each block, or only its input and recompute them; a list: of each block

    Raises:
        ValueError: sizes that do not divide, a value out of range, a ``backward`` that a plain model cannot have; a sequence
            longer than ``context``, or a mask not boolean (at the call).
    """

    reads_masks_on_the_cpu = True

    blocks: ResidualSequence | AveragedStreams

    def __init__(
        self,
        vocab: int = 50265,
        context: int = 512,
        classes: int | None = None,
        dim: int = 768,
        depth: int = 12,
        heads: int = 12,
        mlp_ratio: float = 4.0,
        dropout: float = 0.1,
        attention_dropout: float = 0.1,
        drop_path: float = 0.0,
        backward: str | Sequence[str] = "autograd",
    ) -> None:
        super().__init__()
        branches = transformer_branches(dim, depth, heads, mlp_ratio, dropout, attention_dropout, drop_path, eps=1e-5)
        self.attention_dropout, self.drop_path, self.head_width = attention_dropout, drop_path, dim // heads
        self.embedding = TokenEmbedding(vocab, context, dim, dropout=dropout)
        (self.blocks,) = make_sequences(self, [branches], backward, AveragedStreams, exchange=True)
        self.norm = nn.LayerNorm(dim, eps=1e-5)
        self.head = MaskedWordHead(dim, vocab) if classes is None else ClassHead(dim, classes, dropout)
        initialise(self, depth)

    def forward(self, tokens: Tensor, mask: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        """
        Args:
            tokens: (B, T).
            mask: (B, T), True for tokens, False for padding, whose logits mean nothing; None: no padding. Left on the CPU, it
                lets a GPU skip the padding (:mod:`~holotrain.models.layers.packing`).
            targets: (B, T), the word at each masked position, -100 elsewhere; or (B,), the class of each sequence.

        Returns:
            logits, (B, T, V) or (B, classes); with ``targets`` the mean cross-entropy, without ignored ones.
        """
        x = self.embedding(tokens)
        context = self._padding(mask, x)
        packing = context.get("packing")
        hidden = self.norm(self.blocks(x if packing is None else packing.packed(x), context))
        hidden = hidden if packing is None else packing.padded(hidden)
        return self.head(hidden, self.embedding.word.weight, targets)

    def outside(self) -> tuple[list[nn.Module], list[nn.Module]]:
        tied = [self.embedding.word] if isinstance(self.head, MaskedWordHead) else []
        return [self.embedding], [self.norm, self.head, *tied]

    def enter(self, tokens: Tensor) -> tuple[Tensor, ...]:
        return self.blocks.split(self.embedding(tokens))

    def run(
        self, part: nn.Module, streams: tuple[Tensor, ...], tokens: Tensor, /, *others: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Padding is left out within, if it is worth it."""
        context = self._padding(others[0] if others else None, streams[0])
        packing = context.get("packing")
        if packing is None:
            return as_streams(part(*streams, context))
        return tuple(map(packing.padded, as_streams(part(*map(packing.packed, streams), context))))

    def leave(self, streams: tuple[Tensor, ...], mask: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        return self.head(self.norm(self.blocks.join(streams)), self.embedding.word.weight, targets)

    def stream_shape(self, tokens: Tensor, block: int) -> tuple[int, ...]:
        return *tokens.shape, self.embedding.word.embedding_dim

    def _padding(self, mask: Tensor | None, x: Tensor) -> dict[str, Any]:
        """The keyword arguments of attention."""
        dropout = self.training * self.attention_dropout
        return {} if mask is None else padding_context(mask, x, self.head_width, dropout, self._packs)

    @property
    def _packs(self) -> bool:
        """Whether the blocks can read packed sequences. Drop-path needs them apart, compiled code with fixed lengths."""
        block: Any = self.blocks.blocks[0]
        compiled = any(module._compiled_call_impl is not None for module in (block, block.f, block.g))
        return not compiled and not (self.training and self.drop_path)


class RevRoBERTa(Reversible, RoBERTa):
    """The reversible RoBERTa: both streams start as the embedding, swap after every block, and their mean is the output.

    Its parameters have the same names and shapes as those of its twin, the ``RoBERTa`` with the same arguments.
    """


class MaskedWordHead(nn.Module):
    """Linear, GELU, LayerNorm, then the transposed embedding and a bias for each word: RoBERTa's language-modelling head."""

    def __init__(self, dim: int, vocab: int) -> None:
        super().__init__()
        self.dense = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim, eps=1e-5)
        self.bias = nn.Parameter(torch.zeros(vocab))

    def forward(self, hidden: Tensor, embedding: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (B, T, V), or the mean cross-entropy over the targets that are not ignored; 0 if all are."""
        if targets is not None:
            counted = targets != IGNORED
            hidden, targets = hidden[counted], targets[counted]  # the others need no logits
        hidden = self.norm(F.gelu(self.dense(hidden)))
        if targets is None:
            return F.linear(hidden, embedding, self.bias)
        if not len(targets):
            return hidden.sum()
        return linear_cross_entropy(hidden, embedding, targets, self.bias)


class ClassHead(nn.Module):
    """RoBERTa's classification head on the first token: Linear, tanh, Linear, with dropout before each Linear."""

    def __init__(self, dim: int, classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dense = nn.Linear(dim, dim)
        self.classify = nn.Linear(dim, classes)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, embedding: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (B, classes), or their mean cross-entropy."""
        x = torch.tanh(self.dense(self.dropout(hidden[:, 0])))
        logits = self.classify(self.dropout(x))
        return logits if targets is None else F.cross_entropy(logits, targets)
