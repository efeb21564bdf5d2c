"""Random images of any shape, for measurements."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from holotrain.data.images import ImageDataModule
from holotrain.data.sampler import mixed_seed
from holotrain.ranges import require_at_least


class Noise(Dataset):
    """``size`` random uint8 images with random labels; each is a function of (seed, index)."""

    def __init__(self, size: int, shape: tuple[int, int, int], classes: int, seed: int) -> None:
        self.size, self.shape, self.classes, self.seed = size, shape, classes, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, index))
        image = torch.randint(256, self.shape, dtype=torch.uint8, generator=generator)
        return image, int(torch.randint(self.classes, (), generator=generator))


class Fake(ImageDataModule):
    """Random images instead of photographs, augmented in the same way; nothing is read or stored.

    Args:
        image_size: height and width of an image, in pixels
        channels: color channels
        num_classes: number of classes
        train_size: number of training images
        val_size: number of validation images
        test_size: number of test images
        options: those of :class:`ImageDataModule`

    Raises:
        ValueError: a value out of range.
    """

    def __init__(
        self,
        image_size: int = 224,
        channels: int = 3,
        num_classes: int = 1000,
        train_size: int = 1024,
        val_size: int = 128,
        test_size: int = 128,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        require_at_least(1, image_size=image_size, channels=channels)
        require_at_least(1, train_size=train_size, val_size=val_size, test_size=test_size)
        require_at_least(2, num_classes=num_classes)
        self.num_classes = num_classes
        self.image_shape = (channels, image_size, image_size)
        self.class_names = [str(index) for index in range(num_classes)]
        self.statistics = ([0.5] * channels, [0.289] * channels)
        self.sizes = {"train": train_size, "val": val_size, "test": test_size}

    def split(self, name: str) -> Dataset:
        part = list(self.sizes).index(name)
        return Noise(self.sizes[name], self.image_shape, self.num_classes, mixed_seed(self.seed, part))
