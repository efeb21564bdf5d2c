"""Vision transformers: the reversible one of Mangalam et al. (CVPR 2022) and its plain twin, from the same parts.

Both average over tokens by default; ``pool="class"`` uses a class token, as published ViT weights do. The reversible one starts
both streams from the tokens and fuses them at the end: concatenate, LayerNorm(2C), mean, Linear(2C). This doubles the width of
the head, which is the only difference in parameters.
"""

from typing import Any

from torch import Tensor, nn

from holotrain.models.layers.branches import Branches, transformer_branches
from holotrain.models.layers.fusion import TwoStreamFusion
from holotrain.models.layers.patches import PatchEmbedding
from holotrain.models.layers.residual import ResidualBlock, ResidualSequence
from holotrain.reversible import ReversibleBlock, ReversibleSequence

# Small, base and large as published (Dosovitskiy et al., 2021; Touvron et al., 2021); tiny suits digits and CIFAR.
VIT_SIZES: dict[str, dict[str, int]] = {
    "tiny": {"dim": 96, "depth": 6, "heads": 3},
    "small": {"dim": 384, "depth": 12, "heads": 6},
    "base": {"dim": 768, "depth": 12, "heads": 12},
    "large": {"dim": 1024, "depth": 24, "heads": 16},
}


class ViT(nn.Module):
    """The plain vision transformer: mean over tokens (or the class token), LayerNorm, linear head.

    Args:
        image_size, patch_size: in pixels; the image is square.
        channels: of the image.
        classes: number of classes.
        dim, depth, heads: width C, number of blocks, attention heads.
        mlp_ratio: width of the MLP's hidden layer over C.
        pool: input of the head: the ``"mean"`` of all tokens, or a ``"class"`` token that is put before them.
        dropout: on the embedding, the attention's output and in the MLP.
        attention_dropout: on the attention weights.
        drop_path: stochastic depth of the last block; it grows linearly from 0 at the first.
        backward: ``"autograd"`` stores activations, ``"checkpoint"`` recomputes each block's in the backward.
        engine: further options of a reversible model's sequence; a plain one has none.

    Shapes: images (B, channels, image_size, image_size) -> logits (B, classes).

    Raises:
        ValueError: sizes that do not divide, another ``pool``, a ``backward`` that a plain model cannot have.
    """

    def __init__(
        self,
        image_size: int = 224,
        patch_size: int = 16,
        channels: int = 3,
        classes: int = 1000,
        dim: int = 384,
        depth: int = 12,
        heads: int = 6,
        mlp_ratio: float = 4.0,
        pool: str = "mean",
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        drop_path: float = 0.0,
        backward: str = "autograd",
        **engine: Any,
    ) -> None:
        super().__init__()
        if pool not in ("mean", "class"):
            raise ValueError(f"pool must be mean or class, not {pool!r}")
        self.embedding = PatchEmbedding(image_size, patch_size, channels, dim, dropout, class_token=pool == "class")
        self.pooled = slice(1) if pool == "class" else slice(None)  # the tokens whose mean the head reads
        branches = transformer_branches(dim, depth, heads, mlp_ratio, dropout, attention_dropout, drop_path)
        self._assemble(branches, dim, classes, backward=backward, **engine)
        _initialise(self)

    def _assemble(self, branches: Branches, dim: int, classes: int, backward: str) -> None:
        self.blocks = ResidualSequence((ResidualBlock(f, g) for f, g in branches), backward)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.embedding(images))
        return self.head(self.norm(x[:, self.pooled].mean(dim=1)))


class RevViT(ViT):
    """The reversible vision transformer.

    Takes the keyword arguments of :class:`ViT`, and ``backward``, ``store``, ``exact`` and ``keep`` as
    :class:`~holotrain.reversible.ReversibleSequence` does. Its twin is the ``ViT`` with the same other arguments.

    Shapes: images (B, channels, image_size, image_size) -> logits (B, classes).
    """

    def __init__(self, *, backward: str = "reversible", **arguments: Any) -> None:
        super().__init__(backward=backward, **arguments)

    def _assemble(self, branches: Branches, dim: int, classes: int, **engine: Any) -> None:
        self.blocks = ReversibleSequence((ReversibleBlock(f, g) for f, g in branches), **engine)
        self.fusion = TwoStreamFusion(dim)
        self.head = nn.Linear(2 * dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embedding(images)
        y1, y2 = self.blocks(tokens, tokens)
        return self.head(self.fusion(y1[:, self.pooled], y2[:, self.pooled]))


def _initialise(model: nn.Module) -> None:
    """Truncated normal of 0.02 for weights and positions, zero for biases (Dosovitskiy et al., 2021)."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
        elif isinstance(module, PatchEmbedding):
            nn.init.trunc_normal_(module.position, std=0.02)
