"""Vision transformers: the reversible one of Mangalam et al. (CVPR 2022) and its plain twin, from the same parts.

Both average over tokens by default; ``pool="class"`` uses a class token, as published ViT weights do. The reversible one starts
both streams from the tokens and fuses them at the end: concatenate, LayerNorm(2C), mean, Linear(2C). This doubles the width of
the head, which is the only difference in parameters.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Literal

from torch import Tensor, nn

from holotrain.models.layers.blocks import (
    Divisible,
    LayerScale,
    Reversible,
    TwoStreamFusion,
    as_streams,
    make_sequences,
    transformer_branches,
)
from holotrain.models.layers.patches import PatchEmbedding, initialise
from holotrain.numeric import require_at_least, require_one_of


class ViT(Divisible, nn.Module):
    """The plain vision transformer: mean over tokens (or the class token), LayerNorm, linear head.

    Args:
        image_size: height and width of an image in pixels
        patch_size: height and width of a patch in pixels; null: 16 for images of 112 pixels or more, else 4, or 2 where 4 does
            not divide image_size
        channels: color channels of an image
        classes: number of classes
        dim: embedding width
        depth: number of blocks
        heads: number of attention heads; must divide dim
        mlp_ratio: width of the MLP's hidden layer divided by dim
        pool: input of the head: mean (over all tokens) or class (a learned class token)
        dropout: dropout of the embedding, the attention output and the MLP
        attention_dropout: dropout of the attention weights; above 0, training on a CPU has no fused attention and is slower
        drop_path: stochastic depth rate of the last block; it rises linearly from 0 at the first block
        layer_scale: first value of the learned scales of each branch's channels, such as 1e-4 in deep models; null: no scales
        backward: store the activations of each block, or only its input and recompute them; a list: of each block

    Shapes: images (B, channels, image_size, image_size) -> logits (B, classes).

    Raises:
        ValueError: sizes that do not divide, a value out of range, a ``backward`` that a plain model cannot have.
    """

    def __init__(
        self,
        image_size: int = 224,
        patch_size: int | None = None,
        channels: int = 3,
        classes: int = 1000,
        dim: int = 384,
        depth: int = 12,
        heads: int = 6,
        mlp_ratio: float = 4.0,
        pool: Literal["mean", "class"] = "mean",
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        drop_path: float = 0.0,
        layer_scale: float | None = None,
        backward: str | Sequence[str] = "autograd",
    ) -> None:
        super().__init__()
        branches = transformer_branches(dim, depth, heads, mlp_ratio, dropout, attention_dropout, drop_path)
        require_one_of(("mean", "class"), pool=pool)
        if patch_size is None:  # the published size, and smaller patches for small images
            patch_size = 16 if image_size >= 112 else 4 if image_size % 4 == 0 else 2
        require_at_least(1, patch_size=patch_size)
        self.embedding = PatchEmbedding(image_size, patch_size, channels, dim, dropout, class_token=pool == "class")
        self.pooled = slice(1) if pool == "class" else slice(None)  # the tokens whose mean the head reads
        if layer_scale is not None:
            for branch in chain.from_iterable(branches):
                branch.scale = LayerScale(dim, layer_scale)
        (self.blocks,) = make_sequences(self, [branches], backward)
        self._add_head(dim, classes)
        initialise(self, nn.Linear, nn.Conv2d)  # Dosovitskiy et al., 2021

    def _add_head(self, dim: int, classes: int) -> None:
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.leave(as_streams(self.blocks(*self.enter(images))))

    def outside(self) -> tuple[list[nn.Module], list[nn.Module]]:
        return [self.embedding], [self.norm, self.head]

    def enter(self, images: Tensor) -> tuple[Tensor, ...]:
        return (self.embedding(images),) * self.streams

    def leave(self, streams: tuple[Tensor, ...]) -> Tensor:
        return self.head(self.norm(streams[0][:, self.pooled].mean(dim=1)))

    def stream_shape(self, images: Tensor, block: int) -> tuple[int, ...]:
        return len(images), *self.embedding.position.shape[1:]


class RevViT(Reversible, ViT):
    """The reversible vision transformer. Its twin is the ``ViT`` with the same arguments.

    Shapes: images (B, channels, image_size, image_size) -> logits (B, classes).
    """

    def _add_head(self, dim: int, classes: int) -> None:
        self.fusion = TwoStreamFusion(dim)
        self.head = nn.Linear(2 * dim, classes)

    def outside(self) -> tuple[list[nn.Module], list[nn.Module]]:
        return [self.embedding], [self.fusion, self.head]

    def leave(self, streams: tuple[Tensor, ...]) -> Tensor:
        y1, y2 = streams
        return self.head(self.fusion(y1[:, self.pooled], y2[:, self.pooled]))
