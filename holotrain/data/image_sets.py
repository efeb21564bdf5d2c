"""The data sets of images that are neither files of the user nor of the Hub."""

import contextlib
import importlib.util
import io
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset
from torchvision import datasets
from torchvision.transforms import v2

from holotrain.data.images import ChosenClasses, ImageDataModule, cropped_at_random, held_out
from holotrain.errors import UserError
from holotrain.numeric import mixed_seed, require_at_least


class Digits(ChosenClasses, ImageDataModule):
    """1,797 digits of 8x8 pixels, one channel (Alpaydin and Kaynak, 1998).

    The test part is a fixed fifth of every class and does not depend on ``seed``. Augmentation rotates digits by up
    to ten degrees.
    """

    num_classes = 10
    image_shape = (1, 8, 8)
    statistics = ((0.3053,), (0.3761,))

    def geometry(self) -> list[v2.Transform]:
        return [v2.RandomRotation((-10, 10), interpolation=v2.InterpolationMode.BILINEAR)]

    def setup(self, stage: str | None = None) -> None:
        rows = torch.from_numpy(np.loadtxt(digits_file(), delimiter=","))  # 64 pixels from 0 to 16, and the digit
        images = (rows[:, :64] * (255 / 16)).round().to(torch.uint8).reshape(-1, 1, 8, 8)
        labels = rows[:, 64].long()
        train, test = held_out(TensorDataset(images, labels), labels, 0.2)
        self.split_classes([str(digit) for digit in range(10)], train=train, test=test)


def digits_file() -> Path:
    """The file of scikit-learn's ``load_digits``. To import scikit-learn, with pandas, takes longer than to read it."""
    spec = importlib.util.find_spec("sklearn")
    assert spec is not None and spec.origin is not None, "a dependency"
    return Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"


Source = datasets.MNIST | datasets.CIFAR10


class TorchvisionData(ChosenClasses, ImageDataModule):
    """A data set of torchvision: its training part, of which a fixed share is used for validation, and its test part.

    Args:
        root: folder of the data set
        download: download the data set into root if it is missing
    """

    source: ClassVar[type[Source]]
    files: ClassVar[str]

    def __init__(self, root: str = "data", download: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.root, self.download = root, download

    def prepare_data(self) -> None:
        for train in (True, False):
            self._load(train, self.download)

    def setup(self, stage: str | None = None) -> None:
        parts = {"train": self._load(True, False), "test": self._load(False, False)}
        names = [name.partition(" - ")[0] for name in parts["train"].classes]  # those of MNIST are like "0 - zero"
        self.split_classes(names, **{part: (each, torch.as_tensor(each.targets)) for part, each in parts.items()})

    def _load(self, train: bool, download: bool) -> Source:
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # torchvision prints each attempt
                return self.source(self.root, train=train, download=download)
        except Exception as error:  # a missing, a damaged and an unreachable file each raise differently
            problem = "could not be downloaded" if download else "are missing or damaged, and data.download is false"
            raise UserError(
                f"data: the files of {self.source.__name__} {problem}; put {self.files} into {self.root}"
            ) from error


class MNIST(TorchvisionData):
    """70,000 handwritten digits, 28x28, one channel (LeCun et al., 1998). Augmentation shifts and does not flip."""

    source = datasets.MNIST
    files = "MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte"
    num_classes = 10
    image_shape = (1, 28, 28)
    statistics = ((0.1307,), (0.3081,))

    def geometry(self) -> list[v2.Transform]:
        return cropped_at_random(28, flip=False)


class CIFAR10(TorchvisionData):
    """60,000 photographs of ten classes, 32x32 (Krizhevsky, 2009)."""

    source = datasets.CIFAR10
    files = "cifar-10-batches-py/ (or cifar-10-python.tar.gz)"
    num_classes = 10
    image_shape = (3, 32, 32)
    statistics = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


class CIFAR100(TorchvisionData):
    """60,000 photographs of a hundred classes, 32x32 (Krizhevsky, 2009)."""

    source = datasets.CIFAR100
    files = "cifar-100-python/ (or cifar-100-python.tar.gz)"
    num_classes = 100
    image_shape = (3, 32, 32)
    statistics = ((0.5071, 0.4866, 0.4409), (0.2673, 0.2564, 0.2762))


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
        self.num_classes, self.image_shape = num_classes, (channels, image_size, image_size)
        self.class_names = [str(index) for index in range(num_classes)]
        self.statistics = ([0.5] * channels, [0.289] * channels)
        self.sizes = {"train": train_size, "val": val_size, "test": test_size}

    def split(self, name: str) -> Dataset:
        part = list(self.sizes).index(name)
        return Noise(self.sizes[name], self.image_shape, self.num_classes, mixed_seed(self.seed, part))
