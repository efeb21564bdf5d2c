"""From an image to tokens."""

import torch
from torch import Tensor, nn


class PatchEmbedding(nn.Module):
    """Cuts an image into square patches, embeds each linearly and adds a learned absolute position.

    (B, channels, image_size, image_size) -> (B, T, dim) with T = (image_size / patch_size)^2.

    Raises:
        ValueError: the image size is no multiple of the patch size; an image of another size at the call.
    """

    def __init__(self, image_size: int, patch_size: int, channels: int, dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        if image_size % patch_size:
            raise ValueError(f"image_size must be a multiple of patch_size, but {image_size} is none of {patch_size}")
        self.image_size = image_size
        self.project = nn.Conv2d(channels, dim, kernel_size=patch_size, stride=patch_size)
        self.position = nn.Parameter(torch.zeros(1, (image_size // patch_size) ** 2, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, images: Tensor) -> Tensor:
        _require_size(images, self.image_size)
        tokens = self.project(images).flatten(2).transpose(1, 2)
        return self.dropout(tokens + self.position)


class OverlappingPatches(nn.Module):
    """A convolution of 7x7 pixels every four: patches that overlap. (B, channels, I, I) -> (B, I / 4, I / 4, dim).

    Raises:
        ValueError: an image of another size than ``image_size`` x ``image_size`` at the call.
    """

    STRIDE = 4

    def __init__(self, image_size: int, channels: int, dim: int) -> None:
        super().__init__()
        self.image_size = image_size
        self.project = nn.Conv2d(channels, dim, kernel_size=7, stride=self.STRIDE, padding=3)

    def forward(self, images: Tensor) -> Tensor:
        _require_size(images, self.image_size)
        return self.project(images).permute(0, 2, 3, 1)


def _require_size(images: Tensor, size: int) -> None:
    height, width = images.shape[-2:]
    if (height, width) != (size, size):
        raise ValueError(f"the model takes images of {size}x{size} pixels, not {height}x{width}")
