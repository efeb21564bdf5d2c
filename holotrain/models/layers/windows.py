"""Attention within windows of a feature map, shifted by half a window in every second block (Liu et al., ICCV 2021).

Shapes: B batch, S x S the feature map, N windows of T = window^2 tokens, C channels, H heads, D = C / H head width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holotrain.models.layers.attention import with_one_kernel


def into_windows(x: Tensor, window: int, heads: int) -> Tensor:
    """(B, S, S, C) -> (B, N * H, T, D): each head of each window becomes a separate head."""
    x = x.unflatten(3, (heads, -1)).unflatten(2, (-1, window)).unflatten(1, (-1, window))
    return x.permute(0, 1, 3, 5, 2, 4, 6).flatten(4, 5).flatten(1, 3)


def out_of_windows(x: Tensor, window: int, heads: int) -> Tensor:
    """(B, N * H, T, D) -> (B, S, S, C)."""
    across = round((x.shape[1] // heads) ** 0.5)
    x = x.unflatten(2, (window, window)).unflatten(1, (across, across, heads))
    return x.permute(0, 1, 4, 2, 5, 3, 6).flatten(5, 6).flatten(3, 4).flatten(1, 2)


def shifted_window_mask(size: int, window: int, shift: int) -> Tensor:
    """Which tokens of a window must not see each other, because only the cyclic shift made them neighbours.

    Args:
        size: of the feature map, a multiple of ``window``.

    Returns:
        bool (N, 1, T, T), True where two tokens of a window come from opposite edges of the map.
    """
    place = torch.arange(size)
    region = (place >= size - window).long() + (place >= size - shift).long()
    region = into_windows((3 * region[:, None] + region)[None, :, :, None], window, heads=1)[0]  # (N, T, 1)
    return (region != region.mT)[:, None]


class RelativePositionBias(nn.Module):
    """A learned number for each head and each relative position of two tokens in a window. () -> (H, T, T)."""

    def __init__(self, window: int, heads: int) -> None:
        super().__init__()
        span = 2 * window - 1
        self.position = nn.Parameter(torch.zeros(span**2, heads))  # named as all positions, which do not decay
        place = torch.arange(window)
        step = place[:, None] - place + window - 1  # from one row, or column, to another
        index = span * step[:, None, :, None] + step[None, :, None, :]
        self.register_buffer("index", index.reshape(window**2, window**2), persistent=False)

    def forward(self) -> Tensor:
        return self.position[self.index].permute(2, 0, 1)


class WindowAttention(nn.Module):
    """Multi-head self-attention within windows, with a relative position bias. (B, S, S, C) -> (B, S, S, C).

    If the size of the map is not a multiple of the window, it is padded with zeros below and to the right. Tokens see the
    padding, as in the published models. A window that is not smaller than the map becomes the whole map and is not shifted.

    Args:
        dim, heads: C and H.
        size: S.
        window: tokens along a window, at least 1.
        shifted: by half a window, cyclically; tokens of opposite edges do not see each other.
        dropout, attention_dropout: on the output and on the attention weights.

    Raises:
        ValueError: ``dim`` is not a multiple of ``heads``.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        size: int,
        window: int,
        shifted: bool = False,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim must be a multiple of heads, but {dim} is not a multiple of {heads}")
        self.heads = heads
        self.window = min(window, size)
        self.shift = window // 2 if shifted and window < size else 0
        self.size = size
        self.padding = -size % self.window
        self.attention_dropout = attention_dropout
        self.bias = RelativePositionBias(self.window, heads)
        mask = shifted_window_mask(size + self.padding, self.window, self.shift) if self.shift else None
        self.register_buffer("mask", mask, persistent=False)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.project = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x.roll((-self.shift, -self.shift), dims=(1, 2)) if self.shift else x
        x = F.pad(x, (0, 0, 0, self.padding, 0, self.padding)) if self.padding else x
        q, k, v = (into_windows(part, self.window, self.heads) for part in self.qkv(x).chunk(3, dim=-1))
        dropout = self.attention_dropout if self.training else 0.0
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=self._added(q), dropout_p=dropout, is_causal=False)
        x = out_of_windows(x, self.window, self.heads)[:, : self.size, : self.size]
        x = x.roll((self.shift, self.shift), dims=(1, 2)) if self.shift else x
        return self.dropout(self.project(x))

    def _added(self, q: Tensor) -> Tensor:
        """The bias of the scores for N * H heads, (1, N * H, T, T), shared by the whole batch to save memory."""
        bias = self.bias()[None]
        if self.mask is None:
            bias = bias.expand(q.shape[1] // self.heads, -1, -1, -1)
        else:
            bias = bias.masked_fill(self.mask, float("-inf"))
        bias = bias.flatten(0, 1)[None].to(q.dtype)  # attention's fast kernels need four dimensions
        return with_one_kernel(bias) if self.training else bias
