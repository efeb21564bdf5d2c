"""Transforms of images for training and for evaluation, built from torchvision's transforms v2."""

from collections.abc import Sequence

import torch
from torchvision.transforms import v2

Statistics = tuple[Sequence[float], Sequence[float]]
"""Mean and standard deviation of each channel, for values in [0, 1]."""

IMAGENET: Statistics = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

SMALL = 64
"""Images of up to this many pixels are padded and cropped; larger ones are cropped at random and resized."""


def normalised(statistics: Statistics) -> list[v2.Transform]:
    """Converts to float32 in [0, 1], then to zero mean and unit variance, in the same memory."""
    return [v2.ToImage(), v2.Lambda(scaled), v2.Normalize(*statistics, inplace=True)]


def scaled(image: torch.Tensor) -> torch.Tensor:
    """A new float32 image in [0, 1]."""
    return image.clone() if image.dtype == torch.float32 else v2.functional.to_dtype(image, torch.float32, scale=True)


def cropped_at_random(image_size: int, *, flip: bool = True) -> list[v2.Transform]:
    """The usual crops and flips for training: small images are padded and cropped, others are cropped at random and resized."""
    if image_size <= SMALL:
        crop = v2.RandomCrop(image_size, padding=image_size // 8)
    else:
        crop = v2.RandomResizedCrop(image_size, antialias=True)
    return [crop, v2.RandomHorizontalFlip()] if flip else [crop]


def resized(channels: int, image_size: int) -> list[v2.Transform]:
    """Any image to ``channels`` and ``image_size``: resizes the shorter side to 8/7 of it (small images: to it) and crops."""
    side = image_size if image_size <= SMALL else image_size * 8 // 7
    return [*coloured(channels), v2.Resize(side, antialias=True), v2.CenterCrop(image_size)]


def coloured(channels: int) -> list[v2.Transform]:
    """Any image to a tensor of one (grey) or three channels."""
    return [v2.ToImage(), v2.Grayscale(1) if channels == 1 else v2.RGB()]


def randaugment(operations: int, magnitude: int) -> list[v2.Transform]:
    """RandAugment (Cubuk et al., 2020); an empty list for no operations."""
    return [v2.RandAugment(operations, magnitude)] if operations else []


def batch_mixing(classes: int, mixup_alpha: float, cutmix_alpha: float) -> v2.Transform | None:
    """MixUp (Zhang et al., 2018), CutMix (Yun et al., 2019), a random choice between the two, or None for alphas of 0."""
    mixings = []
    if mixup_alpha:
        mixings.append(v2.MixUp(num_classes=classes, alpha=mixup_alpha))
    if cutmix_alpha:
        mixings.append(v2.CutMix(num_classes=classes, alpha=cutmix_alpha))
    return v2.RandomChoice(mixings) if mixings else None
