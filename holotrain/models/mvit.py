"""Multi-scale vision transformers: MViTv2 (Li et al., CVPR 2022) and its reversible twin, from the same parts.

Resolution falls and width grows from stage to stage. The first block of every later stage changes both and cannot be
reversible; the blocks after it preserve the shape and are reversible. The reversible model starts both streams of a stage from
the output of that first block and continues with their average, so the twins have the same parameters.

The published Rev-MViT-B (Mangalam et al., "Reversible Vision Transformers", CVPR 2022) is another design with blocks of the
same shapes: positions are absolute, queries are not added to the output of attention, the streams are concatenated and fused by
a perceptron before each change of resolution, and the head reads both. Two details of its authors' code are not copied: a block
that fuses streams there drops whole samples, residual path included, where here drop-path drops its branches; biases there
start at 0.02.

Shapes: B batch, S height and width of the square map of tokens, C channels, N heads, D = C / N head width.
"""

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holotrain.models.layers.attention import head_width, with_one_kernel
from holotrain.models.layers.blocks import (
    AttentionBranch,
    AveragedStreams,
    Branches,
    ConcatenatedStreams,
    DropPath,
    MLPBranch,
    ResidualSequence,
    Reversible,
    drop_path_rates,
    make_sequences,
)
from holotrain.models.layers.patches import OverlappingPatches, initialise
from holotrain.numeric import require_at_least, require_one_of, require_within
from holotrain.reversible import checkpointed
from holotrain.reversible.backward_option import stores_everything


class MViT(nn.Module):
    """The plain MViTv2: no class token, LayerNorm, mean over tokens, linear head.

    Args:
        image_size: height and width of an image in pixels; divided by 4 by the embedding and by 2 before each further stage
        channels: color channels of an image
        classes: number of classes
        dim: embedding width of the first stage; it doubles from stage to stage
        depths: number of blocks of each stage; the first block of each further stage lowers the resolution
        heads: attention heads of the first stage; doubled whenever dim doubles
        mlp_ratio: width of the MLP's hidden layer divided by the stage's width
        kv_stride: pooling stride of keys and values in the first stage; halved in each further stage, down to 1
        dropout: dropout of the attention output and the MLP
        drop_path: stochastic depth rate of the last block; it rises linearly from 0 at the first block
        design: mvitv2, or rev_mvit as the published Rev-MViT: positions at the embedding alone, no queries added to the output
            of attention, and in the reversible model a learned fusion of its streams
        backward: store the activations of each block, or only its input and recompute them; a list: of each block

    Shapes: images (B, channels, image_size, image_size) -> logits (B, classes).

    Raises:
        ValueError: sizes that do not divide, a value out of range, a ``backward`` that a plain model cannot have; an image of
            another size at the call.
    """

    def __init__(
        self,
        image_size: int = 224,
        channels: int = 3,
        classes: int = 1000,
        dim: int = 96,
        depths: Sequence[int] = (1, 2, 11, 2),
        heads: int = 1,
        mlp_ratio: float = 4.0,
        kv_stride: int = 4,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        design: Literal["mvitv2", "rev_mvit"] = "mvitv2",
        backward: str | Sequence[str] = "autograd",
    ) -> None:
        super().__init__()
        if not depths:
            raise ValueError("depths needs one number for each stage")
        require_at_least(1, dim=dim, heads=heads, kv_stride=kv_stride, depths=depths)
        require_at_least(0.01, mlp_ratio=mlp_ratio)
        require_within(0, 1, dropout=dropout, drop_path=drop_path)
        reduction = OverlappingPatches.STRIDE * 2 ** (len(depths) - 1)
        if image_size % reduction:
            raise ValueError(f"image_size must be a multiple of {reduction} for {len(depths)} stages, not {image_size}")
        require_one_of(("mvitv2", "rev_mvit"), design=design)
        relative = design == "mvitv2"
        self.embedding = OverlappingPatches(image_size, channels, dim, positions=not relative)
        fuses = isinstance(self, Reversible) and not relative
        size = image_size // OverlappingPatches.STRIDE
        transitions: list[nn.Module] = []
        stages: list[Branches] = []
        for stage, rates in enumerate(drop_path_rates(drop_path, depths)):
            transition = nn.Identity()
            if stage > 0:
                kv_stride = max(kv_stride // 2, 1)
                sizes = (dim, 2 * heads, size, mlp_ratio, kv_stride, dropout, rates.pop(0))
                transition = FusingTransition(*sizes) if fuses else Transition(*sizes, relative)
                dim, heads, size = 2 * dim, 2 * heads, size // 2
            branches: Branches = []
            for rate in rates:
                attention = PoolingAttention(dim, dim, heads, size, 1, kv_stride, dropout, relative)
                norm, mlp = nn.LayerNorm(dim, eps=1e-6), MLPBranch(dim, int(dim * mlp_ratio), dropout, rate)
                branches.append((AttentionBranch(norm, attention, rate), mlp))
            transitions.append(transition)
            stages.append(branches)
        streams = AveragedStreams if relative else ConcatenatedStreams
        self.stages = nn.ModuleList(map(Stage, transitions, make_sequences(self, stages, backward, streams=streams)))
        dim = 2 * dim if fuses else dim
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, classes)
        initialise(self, nn.Linear)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embedding(images)
        for stage in self.stages:
            x = stage(x)
        return self.head(self.norm(x).mean(dim=(1, 2)))


class RevMViT(Reversible, MViT):
    """The reversible MViTv2.

    ``store`` counts the blocks that preserve the shape, over all stages; the others store only their input, unless
    ``backward`` is ``"autograd"``. Its twin is the ``MViT`` with the same arguments.

    Shapes: images (B, channels, image_size, image_size) -> logits (B, classes).
    """


class Transition(nn.Module):
    """The block that halves the resolution and doubles the width. (B, S, S, C) -> (B, S / 2, S / 2, 2C)."""

    def __init__(
        self,
        dim: int,
        heads: int,
        size: int,
        mlp_ratio: float,
        kv_stride: int,
        dropout: float,
        drop_path: float,
        relative: bool,
    ) -> None:
        super().__init__()
        self.f = DownsamplingAttention(dim, heads, size, kv_stride, dropout, drop_path, relative)
        self.g = MLPBranch(2 * dim, int(2 * dim * mlp_ratio), dropout, drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = self.f(x)
        return x + self.g(x)


class FusingTransition(Transition):
    """The block that fuses two concatenated streams and halves the resolution. (B, S, S, 2C) -> (B, S / 2, S / 2, 2C).

    The fusion is a perceptron with a residual path. The residual path of attention is pooled as its queries are, by the same
    weights (Mangalam et al., 2022, section 3.3.1).
    """

    def __init__(
        self, dim: int, heads: int, size: int, mlp_ratio: float, kv_stride: int, dropout: float, drop_path: float
    ) -> None:
        nn.Module.__init__(self)
        width = 2 * dim
        self.fusion = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        attention = PoolingAttention(width, width, heads, size, 2, kv_stride, dropout, relative=False)
        self.f = AttentionBranch(nn.LayerNorm(width, eps=1e-6), attention, drop_path)
        self.g = MLPBranch(width, int(width * mlp_ratio), dropout, drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.fusion(x)
        attention = cast(Any, self.f.attention)  # its queries are pooled
        pooled = attention.pool_q(x.unflatten(-1, (attention.heads, -1)).permute(0, 3, 4, 1, 2))
        x = pooled.permute(0, 2, 3, 1, 4).flatten(3) + self.f(x)
        return x + self.g(x)


class Stage(nn.Module):
    """A transition, except in the first stage, then blocks that preserve the shape. (B, S, S, C) -> (B, S / 2, S / 2, 2C)."""

    def __init__(self, transition: nn.Module, blocks: ResidualSequence | AveragedStreams) -> None:
        super().__init__()
        self.transition = transition
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not stores_everything(self.blocks.backward):
            x = checkpointed(self.transition, x)
        else:
            x = self.transition(x)
        return self.blocks(x)


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
    """Multi-head attention with pooled queries, keys and values. (B, S, S, C) -> (B, S / q_stride, S / q_stride, C_out).

    Args:
        dim, dim_out: channels of the input, and of queries, keys, values and output.
        heads: a divisor of ``dim_out``.
        size: S of the input, for which the tables of relative positions are made.
        q_stride, kv_stride: strides of pooling queries, and of pooling keys and values; divisors of ``size``.
        dropout: on the output.
        relative: with relative positions, and with queries that are always pooled and added to the output.

    Raises:
        ValueError: sizes that do not divide.
    """

    def __init__(
        self, dim: int, dim_out: int, heads: int, size: int, q_stride: int, kv_stride: int, dropout: float, relative: bool
    ) -> None:
        super().__init__()
        width = head_width(dim_out, heads)
        if size % kv_stride:
            raise ValueError(f"{size}x{size} tokens cannot be pooled evenly by a kv stride of {kv_stride}")
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim_out)
        self.pool_q = Pool(width, q_stride) if relative or q_stride > 1 else None
        self.pool_k = Pool(width, kv_stride)
        self.pool_v = Pool(width, kv_stride)
        self.relative = relative
        if relative:
            queries, keys = size // q_stride, size // kv_stride
            self.height_position = nn.Parameter(torch.zeros(2 * max(queries, keys) - 1, width))
            self.width_position = nn.Parameter(torch.zeros(2 * max(queries, keys) - 1, width))
            self.distance: Tensor
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
        self, dim: int, heads: int, size: int, kv_stride: int, dropout: float, drop_path: float, relative: bool
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.shortcut = nn.Linear(dim, 2 * dim)
        self.attention = PoolingAttention(dim, 2 * dim, heads, size, 2, kv_stride, dropout, relative)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        shortcut = F.max_pool2d(self.shortcut(x).permute(0, 3, 1, 2), kernel_size=3, stride=2, padding=1)
        return shortcut.permute(0, 2, 3, 1) + self.drop_path(self.attention(x))
