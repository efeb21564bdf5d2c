"""Multi-head self-attention of ViT, RoBERTa and GPT, with rotary positions and a cache of keys and values.

Shapes: B batch, T tokens, C channels, H heads, D = C / H head width, S tokens that are attended to.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holotrain.models.layers.packing import Packing

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of the angles by which the queries and keys at each position are rotated, (..., T, D / 2)."""


class RotaryPositions(nn.Module):
    """The angles of every position up to ``length``: position times 10000^(-2i / D) for the i-th pair of channels.

    Args:
        length: the longest sequence, in tokens.
        width: D, of an attention head.

    Raises:
        ValueError: an odd width.
    """

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        if width % 2:
            raise ValueError(f"rotary positions need an even width of a head (dim / heads), not {width}")
        frequencies = 10_000.0 ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
        self.cosine: Tensor
        self.sine: Tensor
        self.register_buffer("cosine", angles.cos().float(), persistent=False)
        self.register_buffer("sine", angles.sin().float(), persistent=False)

    def forward(self, positions: Tensor) -> Rotation:
        """
        Args:
            positions: (T,), the same for all sequences, or (B, T).
        """
        return self.cosine[positions].unsqueeze(-3), self.sine[positions].unsqueeze(-3)  # the same for every head


def rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotates queries or keys, (B, H, T, D); channel i is paired with channel i + D / 2."""
    cosine, sine = rotation
    first, second = x.float().chunk(2, dim=-1) if x.dtype.itemsize < 4 else x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1).to(x.dtype)


class KVCache:
    """Buffers for the keys and values of every layer, allocated once and written in place.

    Sequences of a batch may differ in length: a token is written to the slot of its own position, and a query sees the slots up
    to its position. Entries for the padding of a prompt are overwritten before any query sees them. Attention needs no mask,
    and so has its fastest kernel, while prompts are read, and for single tokens that all have the same position.

    Args:
        shape: (L, B, H, S, D), of L layers, with S slots: tokens of prompt and answer together.
        like: has the device and the dtype of the keys.

    Attributes:
        keys, values: (L, B, H, S, D).
        end: upper bound of the slots that a query may see; attention reads no further. ``static`` keeps it at S, for compiled
            code and graphs, which need constant shapes.
    """

    def __init__(self, shape: tuple[int, int, int, int, int], like: Tensor, static: bool = False) -> None:
        self.keys, self.values = (torch.zeros(shape, device=like.device, dtype=like.dtype) for _ in range(2))
        self.static = static
        self._rows = torch.arange(shape[1], device=like.device)[:, None]

    @property
    def length(self) -> int:
        return self.keys.shape[3]

    def seen_from(self, positions: Tensor, end: int) -> Tensor | None:
        """Makes the first ``end`` slots readable and returns which of them each query sees, (B, 1, T, slots).

        Args:
            positions: (B, T), of the next tokens, or (1, T) if they are the same for all sequences.
            end: one more than the largest position.

        Returns:
            None where no mask is needed: each query sees all slots, or, where there are as many queries as slots, those up to
            its own.

        Raises:
            ValueError: there are fewer slots.
        """
        if end > self.length:
            raise ValueError(f"the cache has room for {self.length} tokens, not for {end}")
        self.positions = positions
        self.end = self.length if self.static else end
        rows, tokens = positions.shape
        self._following = not self.static and (tokens == end or (tokens == 1 and rows == 1))
        if self._following:
            return None
        slots = torch.arange(self.end, device=positions.device)
        return (slots <= positions[..., None]).unsqueeze(1)

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the keys and values of new tokens, (B, H, T, D), and returns those of all readable slots, (B, H, slots, D)."""
        for buffer, new in ((self.keys[layer], keys), (self.values[layer], values)):
            if self._following:
                buffer[:, :, self.end - new.shape[2] : self.end] = new
            else:
                buffer[self._rows, :, self.positions] = new.transpose(1, 2).to(buffer.dtype)
        return self.keys[layer, :, :, : self.end], self.values[layer, :, :, : self.end]


def head_width(dim: int, heads: int) -> int:
    """The channels of each head.

    Raises:
        ValueError: ``dim`` is not a multiple of ``heads``.
    """
    if dim % heads:
        raise ValueError(f"heads must divide dim, but {dim} is not a multiple of {heads}")
    return dim // heads


def with_one_kernel(bias: Tensor) -> Tensor:
    """Marks a learned bias of the scores so that attention uses the same kernel with and without a graph.

    PyTorch chooses another kernel, which rounds differently, for a bias that requires grad. A training forward that stores
    nothing must use the same kernel as its recomputation. Otherwise gradients are off by the difference (4% in bf16).
    """
    if not (torch.is_grad_enabled() or torch.compiler.is_compiling()):
        bias.requires_grad_()
    return bias


class Attention(nn.Module):
    """Multi-head self-attention on PyTorch's scaled_dot_product_attention. (B, T, C) -> (B, T, C).

    The rows of ``query_key_value`` are ordered by head: D for the queries of a head, D for its keys and D for its values. So a
    contiguous part of them is whole heads, which a process can hold.

    Args:
        dim, heads: C, H.
        dropout: on the output.
        attention_dropout: on the attention weights.
        causal: a token sees itself and the tokens before it.
        layer: its number in the model, which is its index in a :class:`KVCache`.

    Raises:
        ValueError: ``dim`` is not a multiple of ``heads``.
    """

    def __init__(
        self, dim: int, heads: int, dropout: float = 0.0, attention_dropout: float = 0.0, causal: bool = False, layer: int = 0
    ) -> None:
        super().__init__()
        self.heads = heads
        self.width = head_width(dim, heads)
        self.attention_dropout = attention_dropout
        self.causal = causal
        self.layer = layer
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.project = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        rotation: Rotation | None = None,
        cache: KVCache | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """
        Args:
            mask: True where a query sees a key, broadcast to (B, H, T, S). It replaces ``causal``.
            rotation: of rotary positions.
            cache: keys and values of the tokens before ``x``; the mask is then the cache's, and without one a single query sees
                all keys.
            packing: of the sequences that ``x``, (1, N, C), consists of; a token sees those of its own.
        """
        # The number of heads is that of this process.
        q, k, v = self.query_key_value(x).unflatten(-1, (-1, 3, self.width)).permute(3, 0, 2, 1, 4)  # each (B, H, T, D)
        if rotation is not None:
            q, k = rotated(q, rotation), rotated(k, rotation)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        dropout = self.attention_dropout if self.training else 0.0
        if packing is not None:
            x = packing.attended(q, k, v, dropout)
        else:
            causal = self.causal and mask is None and q.shape[2] == k.shape[2]
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)
        return self.dropout(self.project(x.transpose(1, 2).flatten(2)))
