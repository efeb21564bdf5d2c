"""Multi-scale vision transformers: MViTv2 (Li et al., CVPR 2022) and its reversible twin, from the same parts.

Resolution falls and width grows from stage to stage. The first block of every later stage changes both and cannot be
reversible; the blocks after it preserve the shape and are reversible. The reversible model starts both streams of a stage from
the output of that first block and continues with their average, so the twins have the same parameters.

The published Rev-MViT-B (Mangalam et al., "Reversible Vision Transformers", CVPR 2022: C 96, depths 1, 2, 11, 2, 39 M
parameters, 8.7 GFLOPs) is not the same model as the ``RevMViT`` of size small, which has the same blocks (35 M, 7.0). In its
authors' code the streams are concatenated, with a learned fusion before each change of resolution and a head of double width;
positions are absolute, and queries are not added to the output of attention.
"""

from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from holotrain.models.layers.branches import AttentionBranch, Branches, MLPBranch
from holotrain.models.layers.patches import OverlappingPatches
from holotrain.models.layers.pooling_attention import DownsamplingAttention, PoolingAttention
from holotrain.models.layers.residual import ResidualBlock, ResidualSequence
from holotrain.models.layers.stages import stored_by_stage
from holotrain.models.layers.streams import AveragedStreams
from holotrain.reversible import ReversibleBlock, checkpointed
from holotrain.reversible.schedules import stores_everything

# Tiny, small and base as published (Li et al., 2022, table 1); nano suits images of 32 pixels.
MVIT_SIZES: dict[str, dict[str, Any]] = {
    "nano": {"dim": 32, "depths": (2, 3, 3), "heads": 1, "kv_stride": 2},
    "tiny": {"dim": 96, "depths": (1, 2, 5, 2), "heads": 1, "kv_stride": 4},
    "small": {"dim": 96, "depths": (1, 2, 11, 2), "heads": 1, "kv_stride": 4},
    "base": {"dim": 96, "depths": (2, 3, 16, 3), "heads": 1, "kv_stride": 4},
}


class MViT(nn.Module):
    """The plain MViTv2: no class token, LayerNorm, mean over tokens, linear head.

    Args:
        image_size: in pixels; the image is square. Each side is divided by 4 by the embedding and by 2 before every further
            stage.
        channels: of the image.
        classes: number of classes.
        dim, heads: width C and attention heads of the first stage; both double before every further stage.
        depths: blocks of each stage; in every stage except the first, the first block lowers the resolution.
        mlp_ratio: width of the MLP's hidden layer over C.
        kv_stride: pooling of keys and values in the first stage; it is halved before every further stage, down to 1.
        dropout: on the attention's output and in the MLP.
        drop_path: stochastic depth of the last block; it grows linearly from 0 at the first.
        backward: ``"autograd"`` stores activations, ``"checkpoint"`` recomputes each block's in the backward.
        engine: further options of a reversible model's sequences; a plain one has none.

    Shapes: images (B, channels, image_size, image_size) -> logits (B, classes).

    Raises:
        ValueError: sizes that do not divide, a stage without blocks, a ``backward`` that a plain model cannot have; an image
            of another size at the call.
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
        backward: str = "autograd",
        **engine: Any,
    ) -> None:
        super().__init__()
        reduction = OverlappingPatches.STRIDE * 2 ** (len(depths) - 1)
        if image_size % reduction:
            raise ValueError(f"image_size must be a multiple of {reduction} for {len(depths)} stages, not {image_size}")
        if min(depths) < 1:
            raise ValueError(f"every stage needs at least one block, but depths are {', '.join(map(str, depths))}")
        self.embedding = OverlappingPatches(image_size, channels, dim)
        total = sum(depths)
        rates = iter([drop_path * i / max(total - 1, 1) for i in range(total)])
        size = image_size // OverlappingPatches.STRIDE
        stages: list[tuple[nn.Module, Branches]] = []
        for i, depth in enumerate(depths):
            transition = nn.Identity()
            if i > 0:
                kv_stride = max(kv_stride // 2, 1)
                transition = Transition(dim, 2 * heads, size, mlp_ratio, kv_stride, dropout, next(rates))
                dim, heads, size, depth = 2 * dim, 2 * heads, size // 2, depth - 1
            branches = [
                (
                    AttentionBranch(
                        nn.LayerNorm(dim, eps=1e-6), PoolingAttention(dim, dim, heads, size, 1, kv_stride, dropout), rate
                    ),
                    MLPBranch(dim, int(dim * mlp_ratio), dropout, rate),
                )
                for rate in islice(rates, depth)
            ]
            stages.append((transition, branches))
        self._assemble(stages, backward=backward, **engine)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, classes)
        _initialise(self)

    def _assemble(self, stages: list[tuple[nn.Module, Branches]], backward: str) -> None:
        self.stages = nn.ModuleList(
            Stage(transition, ResidualSequence((ResidualBlock(f, g) for f, g in branches), backward))
            for transition, branches in stages
        )

    def forward(self, images: Tensor) -> Tensor:
        x = self.embedding(images)
        for stage in self.stages:
            x = stage(x)
        return self.head(self.norm(x).mean(dim=(1, 2)))


class RevMViT(MViT):
    """The reversible MViTv2.

    Takes the keyword arguments of :class:`MViT`, and ``backward``, ``store``, ``exact`` and ``keep`` as
    :class:`~holotrain.reversible.ReversibleSequence` does. ``store`` counts the blocks that preserve the shape, over all
    stages; the others store only their input, unless ``backward`` is ``"autograd"``. Its twin is the ``MViT`` with the same
    other arguments.

    Shapes: images (B, channels, image_size, image_size) -> logits (B, classes).
    """

    def __init__(self, *, backward: str = "reversible", **arguments: Any) -> None:
        super().__init__(backward=backward, **arguments)

    def _assemble(self, stages: list[tuple[nn.Module, Branches]], store: int | Collection[int] = 0, **engine: Any) -> None:
        stored = stored_by_stage(store, [len(branches) for _, branches in stages])
        self.stages = nn.ModuleList(
            Stage(transition, AveragedStreams((ReversibleBlock(f, g) for f, g in branches), store=indices, **engine))
            for (transition, branches), indices in zip(stages, stored, strict=True)
        )


class Transition(nn.Module):
    """The block that halves the resolution and doubles the width. (B, S, S, C) -> (B, S / 2, S / 2, 2C)."""

    def __init__(
        self, dim: int, heads: int, size: int, mlp_ratio: float, stride_kv: int, dropout: float, drop_path: float
    ) -> None:
        super().__init__()
        self.f = DownsamplingAttention(dim, heads, size, stride_kv, dropout, drop_path)
        self.g = MLPBranch(2 * dim, int(2 * dim * mlp_ratio), dropout, drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = self.f(x)
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
        elif isinstance(module, PoolingAttention):
            nn.init.trunc_normal_(module.height_position, std=0.02)
            nn.init.trunc_normal_(module.width_position, std=0.02)
