"""From images to tokens, and the first values of models of images."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Patches(nn.Module):
    """Cuts an image into square patches and embeds each linearly.

    (B, channels, image_size, image_size) -> (B, dim, S, S) with S = image_size / patch_size.

    Args:
        overlap: pixels of its neighbours above and to the left that a patch reads too.

    Raises:
        ValueError: the image size is not a multiple of the patch size; an image of another size at the call.
    """

    def __init__(self, image_size: int, patch_size: int, channels: int, dim: int, overlap: int = 0) -> None:
        super().__init__()
        if image_size % patch_size:
            raise ValueError(f"patch_size must divide image_size, but {image_size} is not a multiple of {patch_size}")
        self.image_size = image_size
        self.project = nn.Conv2d(channels, dim, patch_size + overlap, stride=patch_size, padding=overlap)

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        if not height == width == self.image_size:
            size = f"{self.image_size}x{self.image_size}"
            raise ValueError(f"the model takes images of {size} pixels, not {height}x{width}")
        return self.project(images)


class PatchEmbedding(Patches):
    """A sequence of patches, each with a learned absolute position.

    (B, channels, image_size, image_size) -> (B, T, dim) with T = (image_size / patch_size)^2. Raises as :class:`Patches`.

    Args:
        class_token: put a learned token with its own position before the patches, which makes T + 1 tokens.
    """

    def __init__(
        self, image_size: int, patch_size: int, channels: int, dim: int, dropout: float = 0.0, class_token: bool = False
    ) -> None:
        super().__init__(image_size, patch_size, channels, dim)
        self.class_token = nn.Parameter(torch.zeros(dim)) if class_token else None  # a vector, which does not decay
        self.position = nn.Parameter(torch.zeros(1, (image_size // patch_size) ** 2 + class_token, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, images: Tensor) -> Tensor:
        tokens = super().forward(images).flatten(2).transpose(1, 2)
        if self.class_token is not None:
            tokens = torch.cat((self.class_token.expand(tokens.shape[0], 1, -1), tokens), dim=1)
        # Sums keep the order in memory, so each norm of each block would copy the stream again, to read its channels in a row.
        return self.dropout(tokens.contiguous() + self.position)


class PatchMap(Patches):
    """A normalised map of patches without positions. (B, channels, image_size, image_size) -> (B, S, S, dim)."""

    def __init__(self, image_size: int, patch_size: int, channels: int, dim: int, dropout: float = 0.0) -> None:
        super().__init__(image_size, patch_size, channels, dim)
        self.norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, images: Tensor) -> Tensor:
        return self.dropout(self.norm(super().forward(images).permute(0, 2, 3, 1)))


class PatchMerging(nn.Module):
    """Merges 2 x 2 tokens into one of twice the width: LayerNorm(4C), Linear(4C, 2C). (B, S, S, C) -> (B, S / 2, S / 2, 2C).

    A map of odd size is first padded with zeros (Liu et al., ICCV 2021).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim)
        self.project = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
        # The four tokens in the order that published weights expect: by columns, then by rows.
        x = x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).permute(0, 1, 3, 4, 2, 5).flatten(3)
        return self.project(self.norm(x))


class OverlappingPatches(Patches):
    """Overlapping patches: a 7x7 convolution with stride 4. (B, channels, I, I) -> (B, I / 4, I / 4, dim).

    Args:
        positions: add a learned absolute position to each.
    """

    STRIDE = 4

    def __init__(self, image_size: int, channels: int, dim: int, positions: bool = False) -> None:
        super().__init__(image_size, self.STRIDE, channels, dim, overlap=3)
        size = image_size // self.STRIDE
        self.position = nn.Parameter(torch.zeros(1, size, size, dim)) if positions else None

    def forward(self, images: Tensor) -> Tensor:
        patches = super().forward(images).permute(0, 2, 3, 1).contiguous()  # as in PatchEmbedding
        return patches if self.position is None else patches + self.position


def initialise(model: nn.Module, *layers: type[nn.Module]) -> None:
    """Truncated normal of 0.02 for the weights of these kinds of layers and for learned positions, zero for biases. Other
    layers keep PyTorch's own values."""
    for module in model.modules():
        if isinstance(module, layers):
            nn.init.trunc_normal_(cast(Tensor, module.weight), std=0.02)
            if module.bias is not None:
                nn.init.zeros_(cast(Tensor, module.bias))
        for name, parameter in module.named_parameters(recurse=False):
            if name.endswith("position"):
                nn.init.trunc_normal_(parameter, std=0.02)


def resized_positions(positions: Tensor, own: Tensor, has_class: bool, own_class: bool) -> Tensor:
    """Learned positions of patches, resized to another number of patches by bicubic interpolation as in timm.

    Args:
        positions, own: (1, S^2, C), or (1, 1 + S^2, C) with the class token's position first; ``own`` has the wanted shape.
        has_class, own_class: whether they hold a class token's position. If only ``own`` does, it keeps its value.

    Returns:
        positions in the shape of ``own`` if ``positions`` is of a square image; otherwise ``positions``.
    """
    patches = positions[:, int(has_class) :]
    across, wanted = (round(count**0.5) for count in (patches.shape[1], own.shape[1] - own_class))
    if across**2 != patches.shape[1]:
        return positions
    if across != wanted:
        image = patches.float().unflatten(1, (across, across)).permute(0, 3, 1, 2)
        image = F.interpolate(image, size=(wanted, wanted), mode="bicubic", antialias=True)
        patches = image.permute(0, 2, 3, 1).flatten(1, 2).to(positions.dtype)
    if not own_class:
        return patches
    return torch.cat((positions[:, :1] if has_class else own[:, :1].to(patches), patches), dim=1)
