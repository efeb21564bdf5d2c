"""Image files: what to do with one that cannot be read, folders of classes, and files that a user names."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from PIL import Image
from torch.utils.data import Dataset
from torchvision.transforms import v2

from holotrain.data.decoding import EXTENSIONS, MEGAPIXELS, read_image
from holotrain.data.images import SizedImages, Statistics, chosen_classes, normalised, resized
from holotrain.data.loader import Loader, warn_of_left_out
from holotrain.errors import UserError
from holotrain.numeric import require_one_of


def image_paths(folder: Path) -> tuple[list[Path], list[Path]]:
    """The image files below a folder, and the other ones, sorted by name. Links to folders are followed. Hidden files are
    passed over, such as the ``._1.jpg`` of macOS."""
    files = sorted(_files_below(folder))
    images = [path for path in files if path.suffix.lower() in EXTENSIONS]
    return images, [path for path in files if path.suffix.lower() not in EXTENSIONS]


def _files_below(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """``above``: the folders that it is in; a link to one of them, or to what holds it, has no end."""
    here = folder.resolve()
    if any(each.is_relative_to(here) for each in above):
        return
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from _files_below(path, (*above, here))
        elif path.is_file():
            yield path


def warn_of_no_images(paths: Sequence[Path]) -> None:
    """Says which files in folders of images are none, by their extension."""
    warn_of_left_out("file", f"that {'are' if len(paths) > 1 else 'is'} no image by the extension", [*map(str, paths)])


def unchanged(image: Image.Image) -> Image.Image:
    """The image itself: training transforms it with a seed of its own."""
    return image


@dataclass(eq=False)
class ImageFiles(Dataset):
    """Image files with labels: (transformed image, label).

    With ``on_corrupt="skip"``, files that cannot be read are left out of batches, as evaluation reads them; a batch that would
    be empty has the next readable image. Where files are read one by one, as in training, the next readable image and its label
    (after the last, the first) replace them: the length does not change, and resuming still works.
    """

    samples: Sequence[tuple[Path, Any]]
    on_corrupt: str = "skip"
    megapixels: float = MEGAPIXELS
    transform: Callable[[Image.Image], Any] = unchanged

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        for offset in range(len(self)):
            sample = self.read((index + offset) % len(self), "replaced by the next image")
            if sample is not None:
                return sample
        raise UserError("data: there is no readable image")

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, Any]]:
        found = [self.read(index, "left out") for index in indices]
        return [sample for sample in found if sample is not None] or [self[(indices[-1] + 1) % len(self)]]

    def read(self, index: int, remedy: str) -> tuple[Any, Any] | None:
        """A sample. If its file cannot be read: a UserError, or None and a warning that names ``remedy``."""
        path, label = self.samples[index]
        try:
            image = read_image(path, self.megapixels)
        except UserError as error:
            if self.on_corrupt == "error":
                raise UserError(f"data: {error}; data.on_corrupt=skip leaves such images out") from error
            warnings.warn(f"{remedy}: {error}", stacklevel=2)
            return None
        return self.transform(image), label


class NamedImageFiles(ImageFiles):
    """Image files with their paths as labels; a blank image without a path stands for one that cannot be read."""

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, str]]:
        blank = Image.new("RGB", (1, 1))
        return [self.read(index, "left out") or (self.transform(blank), "") for index in indices]


def image_files(
    path: Path,
    channels: int,
    image_size: int,
    statistics: Statistics,
    batch_size: int,
    megapixels: float = MEGAPIXELS,
    **loading: Any,
) -> Loader:
    """The image at a path, or all images below it, converted to these channels, this size and normalisation, in batches
    (images, paths).

    Args:
        megapixels: the largest image, in millions of pixels.
        loading: options of DataLoader, such as ``num_workers``.

    Raises:
        UserError: there is no image at ``path``.
    """
    if not path.exists():
        raise UserError(f"images: there is no file or folder {path}")
    paths, others = ([path], []) if path.is_file() else image_paths(path)
    warn_of_no_images(others)
    if not paths:
        raise UserError(f"images: there is no image in {path}; known extensions are {', '.join(sorted(EXTENSIONS))}")
    transform = v2.Compose([*resized(channels, image_size), *normalised(statistics)])
    files = NamedImageFiles([(path, str(path)) for path in paths], megapixels=megapixels, transform=transform)
    return Loader(files, batch_size=batch_size, **loading)


class ImageFolder(SizedImages):
    """``root/train/<class>/*``, ``root/val/<class>/*`` and ``root/test/<class>/*``. Without a test folder, val is tested.

    Args:
        root: folder with train/<class>/*, val/<class>/* and, optionally, test/<class>/*
        on_corrupt: what to do with an unreadable image: error (end the run) or skip (warn, leave it out; train on the next)
        classes: classes to keep, by name or number, such as [0, 1]; []: all

    """

    def __init__(
        self,
        root: str,
        on_corrupt: Literal["error", "skip"] = "error",
        classes: Sequence[int | str] = (),
        **options: Any,
    ) -> None:
        super().__init__(**options)
        require_one_of(("error", "skip"), on_corrupt=on_corrupt)
        self.root, self.on_corrupt = Path(root), on_corrupt
        self._known = [folder.name for folder in self._classes("train")]
        self.class_names = [self._known[index] for index in chosen_classes(classes, self._known)]
        self.num_classes = len(self.class_names)
        if self.num_classes < 2:
            raise UserError(f"data.root: {self.root / 'train'} holds one class; at least two are needed")

    def setup(self, stage: str | None = None) -> None:
        self._splits = {}
        for part in ("train", "val", "test"):
            folder = "val" if part == "test" and not (self.root / "test").is_dir() else part
            self._splits[part] = ImageFiles(self._samples(folder), self.on_corrupt, self.megapixels)

    def predict_dataloader(self) -> Loader:
        """The test set in batches (images, paths); in place of a file that is skipped, a blank image without a path."""
        samples = [(path, str(path)) for path, _ in cast(ImageFiles, self._splits["test"]).samples]
        files = NamedImageFiles(samples, self.on_corrupt, self.megapixels, self.eval_transform())
        return Loader(files, self.batch_size, **self.loading)

    def _in_order(self, part: str) -> Loader:
        files = self.split(part)
        if not isinstance(files, ImageFiles):  # a subclass has other data
            return super()._in_order(part)
        return Loader(replace(files, transform=self.eval_transform()), self.batch_size, **self.loading)

    def _classes(self, part: str) -> list[Path]:
        folders = sorted(path for path in (self.root / part).glob("*") if path.is_dir() and not path.name.startswith("."))
        if not folders:
            raise UserError(f"data.root: there is no folder {self.root / part}/<class>; put images into such folders")
        return folders

    def _samples(self, part: str) -> list[tuple[Path, int]]:
        labels = {name: index for index, name in enumerate(self.class_names)}
        samples, folders = [], self._classes(part)
        if missing := sorted(labels.keys() - {folder.name for folder in folders}):
            few = f"{', '.join(missing[:3])}{' and others' if len(missing) > 3 else ''}"
            warnings.warn(f"data.root: {self.root / part} has no images of class {few}; its metrics miss them", stacklevel=2)
        not_images: list[Path] = []
        for folder in folders:
            if folder.name not in self._known:
                raise UserError(f"data.root: {folder} is a class that {self.root / 'train'} does not have")
            if folder.name not in labels:
                continue  # it was not chosen
            paths, others = image_paths(folder)
            not_images += others
            if not paths:
                raise UserError(f"data.root: there is no image in {folder}")
            samples += [(path, labels[folder.name]) for path in paths]
        warn_of_no_images(not_images)
        return samples
