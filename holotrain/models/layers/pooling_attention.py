"""Attention among pooled tokens: the multi-scale attention of MViTv2 (Li et al., CVPR 2022, sections 3.1 and 4.1).

Queries, keys and values are pooled by a strided depth-wise convolution. So there are few keys for many tokens, and a block that
pools its queries lowers the resolution of its output. Relative positions add two terms for each query, one for the distance in
height and one for the distance in width. The pooled queries are added to the output of attention. The published Rev-MViT has
neither, and pools queries only to lower the resolution.

Shapes: B batch, S height and width of the square map of tokens, C channels, N heads, D = C / N head width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holotrain.models.layers.attention import with_one_kernel
from holotrain.models.layers.branches import DropPath


class Pool(nn.Module):
    """Depth-wise 3x3 convolution, shared by all heads, and LayerNorm. (B, N, D, S, S) -> (B, N, S / stride, S / stride, D)."""

    def __init__(self, dim: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, dim, kernel_size=3, stride=stride, padding=1, groups=dim, bias=False)
        self.norm = nn.LayerNorm(dim, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.conv(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return self.norm(pooled.permute(0, 1, 3, 4, 2))


class PoolingAttention(nn.Module):
    """Multi-head attention with pooled queries, keys and values. (B, S, S, C) -> (B, S / stride_q, S / stride_q, C_out).

    Args:
        dim, dim_out: channels of the input, and of queries, keys, values and output.
        heads: a divisor of ``dim_out``.
        size: S of the input, for which the tables of relative positions are made.
        stride_q, stride_kv: strides of pooling queries, and of pooling keys and values; divisors of ``size``.
        dropout: on the output.
        relative: with relative positions, and with queries that are always pooled and added to the output.

    Raises:
        ValueError: sizes that do not divide.
    """

    def __init__(
        self,
        dim: int,
        dim_out: int,
        heads: int,
        size: int,
        stride_q: int = 1,
        stride_kv: int = 1,
        dropout: float = 0.0,
        relative: bool = True,
    ) -> None:
        super().__init__()
        if dim_out % heads:
            raise ValueError(f"dim must be a multiple of heads, but {dim_out} is not a multiple of {heads}")
        for name, stride in (("q", stride_q), ("kv", stride_kv)):
            if size % stride:
                raise ValueError(f"{size}x{size} tokens cannot be pooled evenly by a {name} stride of {stride}")
        self.heads = heads
        width = dim_out // heads
        self.qkv = nn.Linear(dim, 3 * dim_out)
        self.pool_q = Pool(width, stride_q) if relative or stride_q > 1 else None
        self.pool_k = Pool(width, stride_kv)
        self.pool_v = Pool(width, stride_kv)
        self.relative = relative
        if relative:
            queries, keys = size // stride_q, size // stride_kv
            self.height_position = nn.Parameter(torch.zeros(2 * max(queries, keys) - 1, width))
            self.width_position = nn.Parameter(torch.zeros(2 * max(queries, keys) - 1, width))
            self.register_buffer("distance", _distances(queries, keys), persistent=False)
        self.project = nn.Linear(dim_out, dim_out)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(3, 0, 4, 5, 1, 2)  # each (B, N, D, S, S)
        q = q.permute(0, 1, 3, 4, 2) if self.pool_q is None else self.pool_q(q)
        k, v = self.pool_k(k), self.pool_v(v)
        size = q.shape[2]
        bias = self._position_bias(q) if self.relative else None
        q, k, v = (part.flatten(2, 3) for part in (q, k, v))
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=False)
        x = x + q if self.relative else x
        return self.dropout(self.project(x.transpose(1, 2).flatten(2))).unflatten(1, (size, size))

    def _position_bias(self, q: Tensor) -> Tensor:
        """The products of each pooled query with the embeddings of its distances to the keys: (B, N, queries^2, keys^2)."""
        h = torch.einsum("bnyxd,ykd->bnyxk", q, self.height_position[self.distance])
        w = torch.einsum("bnyxd,xkd->bnyxk", q, self.width_position[self.distance])
        bias = (h.unsqueeze(-1) + w.unsqueeze(-2)).flatten(4, 5).flatten(2, 3)
        return with_one_kernel(bias) if self.training else bias


def _distances(queries: int, keys: int) -> Tensor:
    """Rows of the table of relative positions: (queries, keys), counted from the most negative distance.

    The steps of the coarser side are stretched to those of the finer side.
    """
    stretch_q, stretch_k = max(keys / queries, 1), max(queries / keys, 1)
    q = torch.arange(queries)[:, None] * stretch_q
    k = torch.arange(keys)[None, :] * stretch_k
    return (q - k + (keys - 1) * stretch_k).long()


class DownsamplingAttention(nn.Module):
    """The attention half of a block that halves the resolution and doubles the width. (B, S, S, C) -> (B, S / 2, S / 2, 2C).

    The residual path cannot be the identity: the normalised input is projected and max-pooled.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        size: int,
        stride_kv: int,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        relative: bool = True,
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.shortcut = nn.Linear(dim, 2 * dim)
        self.attention = PoolingAttention(dim, 2 * dim, heads, size, 2, stride_kv, dropout, relative)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        shortcut = F.max_pool2d(self.shortcut(x).permute(0, 3, 1, 2), kernel_size=3, stride=2, padding=1)
        return shortcut.permute(0, 2, 3, 1) + self.drop_path(self.attention(x))
