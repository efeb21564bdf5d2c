"""Images in files and in rows: decoded, in folders of classes, of the Hugging Face Hub, and files that a user names."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, cast

import torch
from PIL import Image, UnidentifiedImageError, features
from torch.utils.data import Dataset, Subset
from torchvision.datasets.folder import make_dataset
from torchvision.transforms import v2

from holotrain.data.hub import EXTENSIONS, FromHub, class_names, column, in_order
from holotrain.data.images import ChosenClasses, SizedImages, Statistics, chosen_classes, held_out, normalised, resized
from holotrain.data.loader import Loader
from holotrain.errors import UserError
from holotrain.files import open_regular, require_inside
from holotrain.numeric import require_one_of, require_within

if TYPE_CHECKING:
    from datasets import Dataset as Rows

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP", *(["AVIF"] if features.check("avif") else []))
"""Those that Pillow decodes itself. For PostScript, whatever the file is called, it starts Ghostscript."""

UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
"""What :func:`decoded` raises for a file that is no image, damaged or too large."""


def read_image(path: Path) -> Image.Image:
    """The image in a file. Raises a UserError if it cannot be read or is damaged, or has more pixels than Pillow decodes."""
    try:
        with open_regular(path) as file:
            return decoded(file)
    except UNREADABLE as error:
        raise UserError(f"{path} is not a readable image ({error})") from error


def decoded(file: BinaryIO) -> Image.Image:
    """The image in a file. Palettes, transparency and other colour spaces become RGB; grey values keep their 8 or 16 bits.

    Floating-point values are left as they are: they should be in [0, 1].

    Raises:
        OSError, SyntaxError, ValueError: it is damaged or of another format, or Pillow cannot convert it.
        PIL.Image.DecompressionBombError: it has more than twice ``PIL.Image.MAX_IMAGE_PIXELS``.
    """
    try:
        with Image.open(file, formats=FORMATS) as image:
            image.load()
    except UnidentifiedImageError as error:
        raise ValueError(f"it is none of {', '.join(FORMATS)}") from error
    if image.mode in ("RGB", "L", "I;16", "F"):
        return image
    if image.mode.startswith("I"):  # 16 bits in the other order of bytes, or held in 32
        return image.convert("I").convert("I;16")
    if "transparency" in image.info:  # else Pillow warns about palettes with several transparent colours
        image = image.convert("RGBA")
    return image.convert("RGB")


def is_image(path: str | Path) -> bool:
    """Whether a file is an image by its name. Hidden files are none, such as the ``._1.jpg`` of macOS."""
    return Path(path).suffix.lower() in EXTENSIONS and not Path(path).name.startswith(".")


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

    samples: Sequence[tuple[str, Any]]
    on_corrupt: str = "skip"
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
        samples = [self.read(index, "left out") for index in indices]
        return [sample for sample in samples if sample is not None] or [self[(indices[-1] + 1) % len(self)]]

    def read(self, index: int, remedy: str) -> tuple[Any, Any] | None:
        """A sample. If its file cannot be read: a UserError, or None and a warning that names ``remedy``."""
        path, label = self.samples[index]
        try:
            image = read_image(Path(path))
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
    interpolation: str = "bilinear",
    **loading: Any,
) -> Loader:
    """The image at a path, or all images below it, converted to these channels, this size and normalisation, in batches
    (images, paths).

    Args:
        interpolation: how they are resized, bilinear or bicubic.
        loading: options of DataLoader, such as ``num_workers``.

    Raises:
        UserError: there is no image at ``path``.
    """
    if not path.exists():
        raise UserError(f"images: there is no file or folder {path}")
    paths = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file() and is_image(each))
    if not paths:
        raise UserError(f"images: there is no image in {path}; known extensions are {', '.join(sorted(EXTENSIONS))}")
    transform = v2.Compose([*resized(channels, image_size, interpolation), *normalised(statistics)])
    files = NamedImageFiles([(str(path), str(path)) for path in paths], transform=transform)
    return Loader(files, batch_size=batch_size, **loading)


class ImageFolder(SizedImages):
    """``root/train/<class>/*``, ``root/val/<class>/*`` and ``root/test/<class>/*``, or ``root/<class>/*`` alone. Without a test
    folder, val is tested.

    Args:
        root: folder with train/<class>/*, val/<class>/* and, optionally, test/<class>/*; or with <class>/*
        on_corrupt: what to do with an unreadable image: error (end the run) or skip (warn, leave it out; train on the next)
        classes: classes to keep, by name or number, such as [0, 1]; []: all
        val_fraction: share of each class that validates where root has no folder val; null: 0.1 of root/<class>/*, none of
            root/train/<class>/*, which needs a folder val

    """

    def __init__(
        self,
        root: str,
        on_corrupt: Literal["error", "skip"] = "error",
        classes: Sequence[int | str] = (),
        val_fraction: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        require_one_of(("error", "skip"), on_corrupt=on_corrupt)
        require_within(0, 1, val_fraction=val_fraction or 0)
        self.root, self.on_corrupt = Path(root), on_corrupt
        parts = [part for part in ("train", "val", "test") if (self.root / part).is_dir()]
        if "val" in parts and val_fraction is not None:
            raise ValueError(f"val_fraction: {self.root} has a folder val of its own; leave the option out")
        self.train = self.root / "train" if parts else self.root
        self.val_fraction = 0.1 if val_fraction is None and not parts else val_fraction
        self._names = self._class_folders(self.train)
        self.class_names = [self._names[index] for index in chosen_classes(classes, self._names)]
        self.num_classes = len(self.class_names)
        if self.num_classes < 2:
            raise UserError(f"data.root: {self.train} holds one class; at least two are needed")

    def setup(self, stage: str | None = None) -> None:
        train = self._samples(self.train)
        parts = {"train": train}
        if self.val_fraction is None:
            parts["val"] = self._samples(self.root / "val")
        else:
            labels = torch.tensor([label for _, label in train])
            for part, (half, _) in zip(("train", "val"), held_out(ImageFiles(train), labels, self.val_fraction), strict=True):
                parts[part] = [train[index] for index in cast(Subset, half).indices]
        if (self.root / "test").is_dir():
            parts["test"] = self._samples(self.root / "test")
        self._splits = {part: ImageFiles(samples, self.on_corrupt) for part, samples in parts.items()}
        self._splits.setdefault("test", self._splits["val"])

    def predict_dataloader(self) -> Loader:
        """The test set in batches (images, paths); in place of a file that is skipped, a blank image without a path."""
        samples = [(path, path) for path, _ in cast(ImageFiles, self._splits["test"]).samples]
        files = NamedImageFiles(samples, self.on_corrupt, self.eval_transform())
        return Loader(files, self.batch_size, **self.loading)

    def _in_order(self, part: str) -> Loader:
        files = self.split(part)
        if not isinstance(files, ImageFiles):  # a subclass has other data
            return super()._in_order(part)
        return Loader(replace(files, transform=self.eval_transform()), self.batch_size, **self.loading)

    def _class_folders(self, folder: Path) -> list[str]:
        folders = (path for path in folder.glob("*") if path.is_dir() and not path.name.startswith("."))
        if names := sorted(path.name for path in folders):
            return names
        either = f"{folder}/train/<class> or " if folder == self.root else ""
        held = "" if folder.name != "val" else ", or hold out a part of train, as data.val_fraction=0.1 does"
        raise UserError(f"data.root: there is no folder {either}{folder}/<class>; put images into such folders{held}")

    def _samples(self, folder: Path) -> list[tuple[str, int]]:
        """The files of a part and their classes, as torchvision's ImageFolder lists them."""
        names = self._class_folders(folder)
        if unknown := sorted({*names}.difference(self._names)):
            raise UserError(f"data.root: {folder / unknown[0]} is a class that {self.train} does not have")
        if missing := sorted({*self.class_names}.difference(names)):
            warnings.warn(f"data.root: {folder} has no images of class {', '.join(missing)}; metrics miss them", stacklevel=2)
        numbers = {name: number for number, name in enumerate(self.class_names) if name in names}
        try:
            return make_dataset(folder, numbers, is_valid_file=is_image)
        except (FileNotFoundError, ValueError) as error:  # a class, or all that were chosen, have no image
            raise UserError(f"data.root: there is no image of each class in {folder} ({error})") from error


class HubImages(FromHub, ChosenClasses, SizedImages):
    """Images with labels, from two columns of a data set of the Hub, of a folder that save_to_disk wrote, or of files.

    Args:
        name: a folder that save_to_disk wrote, a file, a glob, a folder of files, or a name on the Hub
        image: column of the image
        label: column of the class
        cache_dir: folder in which what is read is cached

    ``num_classes`` is known after ``setup``, or at once if classes are chosen.
    """

    def __init__(
        self, name: str, image: str = "image", label: str = "label", cache_dir: str = "data/hub", **options: Any
    ) -> None:
        super().__init__(name, **options)
        self.image_column, self.label_column = image, label
        self.cache = Path(cache_dir).expanduser()

    def prepare_data(self) -> None:
        self.opened()

    def setup(self, stage: str | None = None) -> None:
        from datasets import Image as ImageFeature

        rows = cast("dict[str, Rows]", self.opened())
        for each in rows.values():
            if not isinstance(kind := column(each, "data.image", self.image_column), ImageFeature):
                raise UserError(f"data.image: column {self.image_column!r} holds no images, but {kind}")
            class_names(each, self.label_column)
        names = class_names(rows["train"], self.label_column)
        labels = range(len(names)) if names else in_order({*rows["train"].unique(self.label_column)} - {None})
        none = (None, -1) if names else (None,)
        numbers = {label: number for number, label in enumerate(labels)} | dict.fromkeys(none, -1)
        names = names or [str(label) for label in labels]
        if len(names) < 2:
            raise UserError(f"data.label: column {self.label_column!r} holds one class; at least two are needed")
        folders, columns = self.folders(), (self.image_column, self.label_column)
        images = {part: HubRows(each, *columns, numbers, folders) for part, each in rows.items()}
        self.split_classes(names, **{part: (each, each.labels) for part, each in images.items()})


class HubRows(Dataset):
    """Rows with an image and a label: (image, number of the class). An image is decoded when it is asked for.

    Args:
        image, label: the columns.
        numbers: the number of each label's class; -1 for labels that mean none.
        folders: where the images lie that are files of their own. Their paths begin in the first one.
    """

    def __init__(self, rows: "Rows", image: str, label: str, numbers: dict[Any, int], folders: Sequence[Path]) -> None:
        from datasets import Image as ImageFeature

        found = rows.select_columns([label])[label][:]
        if unknown := {*found} - {*numbers}:
            raise UserError(f"data.label: {unknown.pop()!r} is a class that the training split does not have")
        self.labels = torch.tensor([numbers[each] for each in found])
        self.rows = rows.select_columns([image]).cast_column(image, ImageFeature(decode=False))  # which may ask a server
        self.image, self.folders = image, folders

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        try:
            with self._file(self.rows[index][self.image] or {}) as file:
                return decoded(file), int(self.labels[index])
        except UNREADABLE as error:
            raise UserError(f"data: row {index} holds no readable image ({error})") from error

    def _file(self, held: dict[str, Any]) -> BinaryIO:
        if held.get("bytes") is not None:
            return BytesIO(held["bytes"])
        path = self.folders[0] / (held.get("path") or "")
        folder = next((each for each in self.folders if path.is_relative_to(each)), self.folders[0])
        require_inside(folder, path)
        return open_regular(path)
