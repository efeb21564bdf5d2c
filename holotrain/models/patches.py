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
        if images.shape[-2:] != (self.image_size, self.image_size):
            height, width = images.shape[-2:]
            raise ValueError(f"the model takes images of {self.image_size}x{self.image_size} pixels, not {height}x{width}")
        tokens = self.project(images).flatten(2).transpose(1, 2)
        return self.dropout(tokens + self.position)
