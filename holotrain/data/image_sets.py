"""The data sets of images that are neither files of the user nor of the Hub."""

import contextlib
import io
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset
from torchvision import datasets
from torchvision.transforms import v2

from holotrain.data.images import ImageDataModule, OfClasses, chosen_classes, cropped_at_random, held_out
from holotrain.errors import UserError
from holotrain.numeric import mixed_seed, require_at_least, require_within


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
        return [v2.RandomRotation((-10, 10), interpolation=v2.InterpolationMode.BILINEAR)]

    def setup(self, stage: str | None = None) -> None:
        from sklearn.datasets import load_digits  # the import takes longer than the other data sets need

        digits = load_digits()
        images = torch.from_numpy(digits.images * (255 / 16)).round().to(torch.uint8).unsqueeze(1)
        labels = torch.from_numpy(digits.target).long()
        rest, test = held_out(TensorDataset(images, labels), labels, 0.2)
        train, val = held_out(*rest, self.val_fraction)
        parts = {"train": train, "val": val, "test": test}
        self._splits = {name: OfClasses(*part, self._kept) for name, part in parts.items()}


Source = datasets.MNIST | datasets.CIFAR10


class TorchvisionData(ImageDataModule):
    """A data set of torchvision: its training part, of which a fixed share is used for validation, and its test part.

    Args:
        root: folder of the data set
        download: download the data set into root if it is missing
        val_fraction: fraction of the training set that is used for validation
        classes: classes to keep, by name or number, such as [0, 1]; []: all
        options: those of :class:`ImageDataModule`

    ``class_names`` are known after ``setup``, ``num_classes`` at once.

    Raises:
        ValueError: a value out of range.
    """

    source: ClassVar[type[Source]]
    files: ClassVar[str]

    def __init__(
        self,
        root: str = "data",
        download: bool = True,
        val_fraction: float = 0.1,
        classes: Sequence[int | str] = (),
        **options: Any,
    ) -> None:
        super().__init__(**options)
        require_within(0, 1, val_fraction=val_fraction)
        self.num_classes = len(classes) or type(self).num_classes
        self.root, self.download, self.val_fraction, self.asked = root, download, val_fraction, classes

    def prepare_data(self) -> None:
        """
        Raises:
            UserError: the files are damaged, or missing and cannot be downloaded.
        """
        for train in (True, False):
            self._load(train, self.download)

    def setup(self, stage: str | None = None) -> None:
        training, test = (self._load(part, False) for part in (True, False))
        names = self.names_of(training)
        kept = chosen_classes(self.asked, names)
        self.class_names, self.num_classes = [names[index] for index in kept], len(kept)
        train, val = held_out(training, torch.as_tensor(training.targets), self.val_fraction)
        parts = {"train": train, "val": val, "test": (test, torch.as_tensor(test.targets))}
        self._splits = {name: OfClasses(*part, kept) for name, part in parts.items()}

    def names_of(self, dataset: Source) -> list[str]:
        """The names of all classes."""
        return type(self).class_names

    def _load(self, train: bool, download: bool) -> Source:
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # torchvision prints each attempt
                return self.source(self.root, train=train, download=download)
        except Exception as error:  # a missing, a damaged and an unreachable file each raise differently
            asked = "could not be downloaded" if download else "are missing or damaged, and data.download is false"
            raise UserError(f"data: the files of {self.source.__name__} {asked}; put {self.files} into {self.root}") from error


class MNIST(TorchvisionData):
    """70,000 handwritten digits, 28x28, one channel (LeCun et al., 1998). Augmentation shifts and does not flip."""

    source = datasets.MNIST
    files = "MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte"
    num_classes = 10
    image_shape = (1, 28, 28)
    class_names = [str(digit) for digit in range(10)]
    statistics = ((0.1307,), (0.3081,))

    def geometry(self) -> list[v2.Transform]:
        return cropped_at_random(28, flip=False)


class CIFAR10(TorchvisionData):
    """60,000 photographs of ten classes, 32x32 (Krizhevsky, 2009)."""

    source = datasets.CIFAR10
    files = "cifar-10-batches-py/ (or cifar-10-python.tar.gz)"
    num_classes = 10
    image_shape = (3, 32, 32)
    class_names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    statistics = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


class CIFAR100(TorchvisionData):
    """60,000 photographs of a hundred classes, 32x32 (Krizhevsky, 2009)."""

    source = datasets.CIFAR100
    files = "cifar-100-python/ (or cifar-100-python.tar.gz)"
    num_classes = 100
    image_shape = (3, 32, 32)
    class_names = [str(index) for index in range(100)]
    statistics = ((0.5071, 0.4866, 0.4409), (0.2673, 0.2564, 0.2762))

    def names_of(self, dataset: Source) -> list[str]:
        return list(dataset.classes)


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
        self.num_classes, self.image_shape = num_classes, (channels, image_size, image_size)
        self.class_names = [str(index) for index in range(num_classes)]
        self.statistics = ([0.5] * channels, [0.289] * channels)
        self.sizes = {"train": train_size, "val": val_size, "test": test_size}

    def split(self, name: str) -> Dataset:
        part = list(self.sizes).index(name)
        return Noise(self.sizes[name], self.image_shape, self.num_classes, mixed_seed(self.seed, part))
