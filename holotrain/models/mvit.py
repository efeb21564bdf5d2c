"""Multi-scale vision transformers: MViTv2 (Li et al., CVPR 2022) and its reversible twin, from the same parts.

Resolution falls and width grows from stage to stage. The first block of every later stage changes both and cannot be
reversible; the blocks after it preserve the shape and are reversible. The reversible model starts both streams of a stage from
the output of that first block and continues with their average, so the twins have the same parameters.

The published Rev-MViT-B (Mangalam et al., "Reversible Vision Transformers", CVPR 2022) is another design with blocks of the
same shapes: positions are absolute, queries are not added to the output of attention, the streams are concatenated and fused by
a perceptron before each change of resolution, and the head reads both. Two details of its authors' code are not copied: a block
that fuses streams there drops whole samples, residual path included, where here drop-path drops its branches; biases there
start at 0.02.
"""

from collections.abc import Sequence
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn

from holotrain.models.layers.branches import AttentionBranch, Branches, MLPBranch
from holotrain.models.layers.patches import OverlappingPatches
from holotrain.models.layers.pooling_attention import DownsamplingAttention, PoolingAttention
from holotrain.models.layers.residual import ResidualBlock, ResidualSequence
from holotrain.models.layers.reversible import Reversible
from holotrain.models.layers.stages import stored_by_stage
from holotrain.models.layers.streams import AveragedStreams, ConcatenatedStreams
from holotrain.ranges import require_at_least, require_within
from holotrain.reversible import ReversibleBlock, checkpointed
from holotrain.reversible.schedules import stores_everything

# Tiny, small and base as published (Li et al., 2022, table 1), and the published Rev-MViT-B; nano suits images of 32 pixels.
MVIT_SIZES: dict[str, dict[str, Any]] = {
    "nano": {"dim": 32, "depths": (2, 3, 3), "heads": 1, "kv_stride": 2},
    "tiny": {"dim": 96, "depths": (1, 2, 5, 2), "heads": 1, "kv_stride": 4},
    "small": {"dim": 96, "depths": (1, 2, 11, 2), "heads": 1, "kv_stride": 4},
    "base": {"dim": 96, "depths": (2, 3, 16, 3), "heads": 1, "kv_stride": 4},
    "paper_base": {"dim": 96, "depths": (1, 2, 11, 2), "heads": 1, "kv_stride": 4, "design": "rev_mvit"},
}


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

    TWO_STREAMS = False

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
        backward: Literal["autograd", "checkpoint"] | Sequence[str] = "autograd",
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
        if design not in ("mvitv2", "rev_mvit"):
            raise ValueError(f"design must be mvitv2 or rev_mvit, not {design!r}")
        self.design, relative = design, design == "mvitv2"
        self.embedding = OverlappingPatches(image_size, channels, dim, positions=not relative)
        fuses = self.TWO_STREAMS and not relative
        total = sum(depths)
        rates = (drop_path * i / max(total - 1, 1) for i in range(total))
        size = image_size // OverlappingPatches.STRIDE
        stages: list[tuple[nn.Module, Branches]] = []
        for i, depth in enumerate(depths):
            transition = nn.Identity()
            if i > 0:
                kv_stride = max(kv_stride // 2, 1)
                sizes = (dim, 2 * heads, size, mlp_ratio, kv_stride, dropout, next(rates))
                transition = FusingTransition(*sizes) if fuses else Transition(*sizes, relative)
                dim, heads, size, depth = 2 * dim, 2 * heads, size // 2, depth - 1
            branches = [
                (
                    AttentionBranch(
                        nn.LayerNorm(dim, eps=1e-6),
                        PoolingAttention(dim, dim, heads, size, 1, kv_stride, dropout, relative),
                        rate,
                    ),
                    MLPBranch(dim, int(dim * mlp_ratio), dropout, rate),
                )
                for rate in islice(rates, depth)
            ]
            stages.append((transition, branches))
        self._assemble(stages, backward)
        dim = 2 * dim if fuses else dim
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, classes)
        _initialise(self)

    def _assemble(self, stages: list[tuple[nn.Module, Branches]], backward: str | Sequence[str]) -> None:
        self.stages = nn.ModuleList(
            Stage(transition, ResidualSequence((ResidualBlock(f, g) for f, g in branches), backward))
            for transition, branches in stages
        )

    def forward(self, images: Tensor) -> Tensor:
        x = self.embedding(images)
        for stage in self.stages:
            x = stage(x)
        return self.head(self.norm(x).mean(dim=(1, 2)))


class RevMViT(Reversible, MViT):
    """The reversible MViTv2.

    Takes the keyword arguments of :class:`MViT` and of :class:`~holotrain.models.layers.reversible.Reversible`. ``store``
    counts the blocks that preserve the shape, over all stages; the others store only their input, unless ``backward`` is
    ``"autograd"``. Its twin is the ``MViT`` with the same arguments of the former.

    Shapes: images (B, channels, image_size, image_size) -> logits (B, classes).
    """

    TWO_STREAMS = True

    def _assemble(self, stages: list[tuple[nn.Module, Branches]], backward: str | Sequence[str]) -> None:
        streams = AveragedStreams if self.design == "mvitv2" else ConcatenatedStreams
        stored = stored_by_stage(self._engine["store"], [len(branches) for _, branches in stages])
        self.stages = nn.ModuleList(
            Stage(
                transition,
                streams((ReversibleBlock(f, g) for f, g in branches), backward, **self._engine | {"store": indices}),
            )
            for (transition, branches), indices in zip(stages, stored, strict=True)
        )


class Transition(nn.Module):
    """The block that halves the resolution and doubles the width. (B, S, S, C) -> (B, S / 2, S / 2, 2C)."""

    def __init__(
        self,
        dim: int,
        heads: int,
        size: int,
        mlp_ratio: float,
        stride_kv: int,
        dropout: float,
        drop_path: float,
        relative: bool = True,
    ) -> None:
        super().__init__()
        self.f = DownsamplingAttention(dim, heads, size, stride_kv, dropout, drop_path, relative)
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
        self, dim: int, heads: int, size: int, mlp_ratio: float, stride_kv: int, dropout: float, drop_path: float
    ) -> None:
        nn.Module.__init__(self)
        width = 2 * dim
        self.fusion = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        attention = PoolingAttention(width, width, heads, size, 2, stride_kv, dropout, relative=False)
        self.f = AttentionBranch(nn.LayerNorm(width, eps=1e-6), attention, drop_path)
        self.g = MLPBranch(width, int(width * mlp_ratio), dropout, drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.fusion(x)
        attention = self.f.attention
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


def _initialise(model: nn.Module) -> None:
    """Truncated normal of 0.02 for Linear weights and relative positions, zero for biases; PyTorch's own for convolutions."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
        elif isinstance(module, PoolingAttention) and module.relative:
            nn.init.trunc_normal_(module.height_position, std=0.02)
            nn.init.trunc_normal_(module.width_position, std=0.02)
        elif isinstance(module, OverlappingPatches) and module.position is not None:
            nn.init.trunc_normal_(module.position, std=0.02)
