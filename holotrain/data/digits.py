"""scikit-learn's handwritten digits: real 8x8 images that are installed with a dependency."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset
from torchvision.transforms import v2

from holotrain.data.classes import OfClasses, chosen_classes
from holotrain.data.images import ImageDataModule, held_out
from holotrain.ranges import require_within


class Digits(ImageDataModule):
    """1,797 digits of 8x8 pixels, one channel (Alpaydin and Kaynak, 1998).

    The test part is a fixed fifth of every class and does not depend on ``seed``. Augmentation rotates digits by up
    to ten degrees.

    Args:
        val_fraction: fraction of the images outside the test set that is used for validation
        classes: classes to keep, by name or number, such as [0, 1]; []: all
        options: those of :class:`ImageDataModule`

    Raises:
        ValueError: a value out of range.
        UserError: no such class, or only one.
    """

    num_classes = 10
    image_shape = (1, 8, 8)
    class_names = [str(digit) for digit in range(10)]
    statistics = ((0.3053,), (0.3761,))

    def __init__(self, val_fraction: float = 0.1, classes: Sequence[int | str] = (), **options: Any) -> None:
        super().__init__(**options)
        require_within(0, 1, val_fraction=val_fraction)
        self._kept = chosen_classes(classes, self.class_names)
        self.class_names = [self.class_names[index] for index in self._kept]
        self.num_classes = len(self._kept)
        self.val_fraction = val_fraction

    def geometry(self) -> list[v2.Transform]:
        return [v2.RandomRotation(10, interpolation=v2.InterpolationMode.BILINEAR)]

    def setup(self, stage: str | None = None) -> None:
        from sklearn.datasets import load_digits  # the import takes longer than the other data sets need

        digits = load_digits()
        images = torch.from_numpy(digits.images * (255 / 16)).round().to(torch.uint8).unsqueeze(1)
        labels = torch.from_numpy(digits.target).long()
        rest, test = held_out(TensorDataset(images, labels), labels, 0.2)
        of_rest = labels[rest.indices]
        train, val = held_out(rest, of_rest, self.val_fraction)
        parts = {
            "train": (train, of_rest[train.indices]),
            "val": (val, of_rest[val.indices]),
            "test": (test, labels[test.indices]),
        }
        self._splits = {name: OfClasses(part, known, self._kept) for name, (part, known) in parts.items()}

    def split(self, name: str) -> Dataset:
        return self._splits[name]
