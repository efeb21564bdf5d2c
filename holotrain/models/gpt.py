"""GPT, causal and pre-norm (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019), and RevGPT.

The head is tied to the embedding. Positions are rotary, or learned as in GPT-2.
Shapes: B batch, T tokens, C channels, V words.
"""

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holotrain.models.layers.attention import KVCache, RotaryPositions
from holotrain.models.layers.blocks import (
    AveragedStreams,
    Divisible,
    ResidualSequence,
    Reversible,
    make_sequences,
    transformer_branches,
)
from holotrain.models.layers.text_layers import TokenEmbedding, initialise
from holotrain.numeric import require_one_of
from holotrain.reversible.chunk_keys import ChunkedKeys
from holotrain.reversible.chunked_call import ChunkedCall
from holotrain.reversible.tiled_loss import linear_cross_entropy


class GPT(Divisible, nn.Module):
    """The plain causal transformer.

    Args:
        vocab: V, number of words
        context: the longest sequence, in tokens
        dim: embedding width
        depth: number of blocks
        heads: number of attention heads; must divide dim
        mlp_ratio: width of the MLP's hidden layer divided by dim
        positions: position embedding: rotary or learned (as in GPT-2)
        gelu: approximation of GELU: none (exact) or tanh (as in GPT-2)
        dropout: dropout of the embedding, the attention output and the MLP
        attention_dropout: dropout of the attention weights; above 0, training on a CPU has no fused attention and is slower
        drop_path: stochastic depth rate of the last block; it rises linearly from 0 at the first block
        backward: store the activations of each block, or only its input and recompute them; a list: of each block

    Raises:
        ValueError: sizes that do not divide, a value out of range, a ``backward`` that a plain model cannot have; a sequence
            longer than ``context`` (at the call).
    """

    blocks: ResidualSequence | AveragedStreams

    def __init__(
        self,
        vocab: int = 50257,
        context: int = 1024,
        dim: int = 768,
        depth: int = 12,
        heads: int = 12,
        mlp_ratio: float = 4.0,
        positions: Literal["rotary", "learned"] = "rotary",
        gelu: Literal["none", "tanh"] = "none",
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        drop_path: float = 0.0,
        backward: str | Sequence[str] = "autograd",
    ) -> None:
        super().__init__()
        branches = transformer_branches(
            dim, depth, heads, mlp_ratio, dropout, attention_dropout, drop_path, causal=True, eps=1e-5, gelu=gelu
        )
        require_one_of(("rotary", "learned"), positions=positions)
        require_one_of(("none", "tanh"), gelu=gelu)
        self.context = context
        self.heads = heads
        self.embedding = TokenEmbedding(vocab, context, dim, positions == "learned", dropout=dropout)
        self.rotary = RotaryPositions(context, dim // heads) if positions == "rotary" else None
        (self.blocks,) = make_sequences(self, [branches], backward, streams=AveragedStreams, exchange=True)
        self.norm = nn.LayerNorm(dim, eps=1e-5)
        initialise(self, depth)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        end: int | None = None,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> Tensor:
        """
        Args:
            tokens: (B, T).
            targets: (B, T), the token that follows each; -100 for those to ignore.
            cache: of the tokens before these; these are added to it.
            positions: (B, T), the position of each token, or (1, T) if all sequences have the same; with a cache.
            end: one more than the largest position; with a cache.
            reduction: of the cross-entropy.

        Returns:
            logits (B, T, V); with ``targets`` the cross-entropy, computed without all logits in memory at once.
        """
        return self._output(self.hidden(tokens, cache=cache, positions=positions, end=end), targets, reduction)

    def _output(self, hidden: Tensor, targets: Tensor | None, reduction: str = "mean") -> Tensor:
        if targets is None:
            return self.logits(hidden)
        weight = self.embedding.word.weight
        return linear_cross_entropy(hidden.flatten(0, 1), weight, targets.flatten(), reduction=reduction)

    def hidden(
        self, tokens: Tensor, *, cache: KVCache | None = None, positions: Tensor | None = None, end: int | None = None
    ) -> Tensor:
        """The input of the head, (B, T, C); arguments as in ``forward``."""
        x = self.embedding(tokens, positions)
        context = self.context_of(tokens, positions)
        if cache is not None:
            context |= {"cache": cache, "mask": cache.seen_from(cast(Tensor, positions), cast(int, end))}
        return self.norm(self.blocks(x, context))

    def context_of(self, tokens: Tensor, positions: Tensor | None = None) -> dict[str, Any]:
        """The keyword arguments of attention."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        return {} if self.rotary is None else {"rotation": self.rotary(positions)}

    def outside(self) -> tuple[list[nn.Module], list[nn.Module]]:
        return [self.embedding], [self.norm, self.embedding.word]

    def enter(self, tokens: Tensor) -> tuple[Tensor, ...]:
        return self.blocks.split(self.embedding(tokens))

    def leave(self, streams: tuple[Tensor, ...], targets: Tensor | None = None) -> Tensor:
        return self._output(self.norm(self.blocks.join(streams)), targets)

    def stream_shape(self, tokens: Tensor, block: int) -> tuple[int, ...]:
        return *tokens.shape, self.embedding.word.embedding_dim

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., C) -> (..., V), by the transposed embedding."""
        return F.linear(hidden, self.embedding.word.weight)

    def cache(self, batch: int, length: int | None = None, static: bool = False) -> KVCache:
        """An empty cache for ``batch`` sequences of up to ``length`` tokens (None: the context), on the model's device."""
        width = self.embedding.word.embedding_dim // self.heads
        shape = (len(self.blocks.blocks), batch, self.heads, length or self.context, width)
        return KVCache(shape, self.norm.weight, static)

    def chunked_call(self, tokens: Tensor, targets: Tensor) -> ChunkedCall:
        """For :func:`~holotrain.reversible.train_in_chunks`."""
        return _Chunks(self, tokens, targets)


class _Chunks(ChunkedCall):
    """A call by chunks, which is its own cache."""

    def __init__(self, model: GPT, tokens: Tensor, targets: Tensor) -> None:
        self._model, self._tokens, self.labels = model, tokens, targets
        self.keys = ChunkedKeys([None] * len(model.blocks.blocks), tokens.shape[1], on_host=False)

    def run(self, start: int, stop: int) -> None:
        self._model.hidden(**self._chunk(start, stop))

    def arguments(self, start: int, stop: int) -> dict[str, Any]:
        return self._chunk(start, stop) | {"targets": self.labels[:, start:stop], "reduction": "sum"}

    def _chunk(self, start: int, stop: int) -> dict[str, Any]:
        positions = torch.arange(start, stop, device=self._tokens.device)[None]
        return {"tokens": self._tokens[:, start:stop], "cache": self, "positions": positions, "end": stop}

    def seen_from(self, positions: Tensor, end: int) -> Tensor | None:
        """As of :class:`KVCache`."""
        tokens = positions.shape[1]
        if tokens == end:
            return None
        return torch.ones(tokens, end, dtype=torch.bool, device=positions.device).tril(end - tokens)

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self.keys.layers[layer].update(keys, values)


class RevGPT(Reversible, GPT):
    """The reversible GPT: both streams start as the embedding, swap after every block, and their mean is the output.

    Its parameters have the same names and shapes as those of its twin, the ``GPT`` with the same arguments.
    """
