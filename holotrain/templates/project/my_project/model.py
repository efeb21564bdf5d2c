"""A small reversible transformer for images."""

import torch
from holotrain.reversible import ReversibleBlock, ReversibleSequence
from torch import Tensor, nn


class Attention(nn.Module):
    """Self-attention of tokens (B, T, dim), with its norm and without the residual connection."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.attention(x, x, x, need_weights=False)[0]


def mlp(dim: int) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))


class Net(nn.Module):
    """Maps images (B, channels, image_size, image_size) to logits (B, classes).

    The data module tells ``image_size``, ``channels`` and ``classes``. The other arguments are options of the command line.

    Args:
        image_size: height and width of an image in pixels
        channels: color channels of an image
        classes: number of classes
        dim: width of a token
        depth: number of blocks
        heads: number of attention heads; must divide dim
        patch_size: height and width of a patch in pixels

    Raises:
        ValueError: ``heads`` does not divide ``dim``.
    """

    def __init__(
        self, image_size: int, channels: int, classes: int, dim: int = 64, depth: int = 4, heads: int = 4, patch_size: int = 2
    ) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim {dim} is not a multiple of heads {heads}")
        self.patches = nn.Conv2d(channels, dim, patch_size, stride=patch_size)
        self.position = nn.Parameter(0.02 * torch.randn((image_size // patch_size) ** 2, dim))
        self.blocks = ReversibleSequence(ReversibleBlock(Attention(dim, heads), mlp(dim)) for _ in range(depth))
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, classes))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.position  # (B, T, dim)
        y1, y2 = self.blocks(x, x)  # in each block: y1 = x1 + attention(x2), y2 = x2 + mlp(y1)
        return self.head((y1 + y2).mean(1) / 2)
