"""Images with one folder for each class, the layout of ImageNet."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from torch.utils.data import Dataset
from torchvision.transforms import v2

from holotrain.data.augment import IMAGENET, coloured, cropped_at_random, resized
from holotrain.data.classes import chosen_classes
from holotrain.data.files import LabelledFiles, image_paths
from holotrain.data.images import ImageDataModule
from holotrain.data.processor import statistics_of
from holotrain.errors import UserError
from holotrain.ranges import require_at_least, require_one_of


class ImageFolder(ImageDataModule):
    """``root/train/<class>/*``, ``root/val/<class>/*`` and ``root/test/<class>/*``. Without a test folder, val is tested.

    Args:
        root: folder with train/<class>/*, val/<class>/* and, optionally, test/<class>/*
        image_size: height and width of an image after augmentation, in pixels
        on_corrupt: what to do with an unreadable image: error (end the run) or skip (warn and leave it out)
        classes: classes to keep, by name or number, such as [0, 1]; []: all
        processor: normalise as a published model does: its folder, with preprocessor_config.json or timm's config.json, or its
            name in timm; null: as for ImageNet
        options: those of :class:`ImageDataModule`

    Raises:
        ValueError: a value out of range.
        UserError: the processor says no mean and deviation, a folder is missing, a class is empty, there is only one class, or
            val or test has a class that train does not have.
    """

    statistics = IMAGENET

    def __init__(
        self,
        root: str,
        image_size: int = 224,
        on_corrupt: Literal["error", "skip"] = "error",
        classes: Sequence[int | str] = (),
        processor: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        require_at_least(1, image_size=image_size)
        require_one_of(("error", "skip"), on_corrupt=on_corrupt)
        self.root = Path(root)
        if processor is not None:
            self.statistics = statistics_of(processor)
        self.on_corrupt = on_corrupt
        self.image_shape = (3, image_size, image_size)
        self._known = self._classes(self._folder("train"))
        self.class_names = [self._known[index] for index in chosen_classes(classes, self._known)]
        self.num_classes = len(self.class_names)
        if self.num_classes < 2:
            raise UserError(f"data.root: {self.root / 'train'} holds one class; at least two are needed")

    def geometry(self) -> list[v2.Transform]:
        size = self.image_shape[1]
        framed = self.framing() if size <= 64 else coloured(3)
        return [*framed, *cropped_at_random(size)]

    def framing(self) -> list[v2.Transform]:
        return resized(*self.image_shape[:2])

    def setup(self, stage: str | None = None) -> None:
        test = "test" if (self.root / "test").is_dir() else "val"
        folders = {"train": "train", "val": "val", "test": test}
        self._splits = {name: LabelledFiles(self._samples(folder), self.on_corrupt) for name, folder in folders.items()}

    def split(self, name: str) -> Dataset:
        return self._splits[name]

    def _folder(self, name: str) -> Path:
        folder = self.root / name
        if not folder.is_dir():
            raise UserError(f"data.root: there is no folder {folder}; put images into {folder}/<class>/")
        return folder

    @staticmethod
    def _classes(folder: Path) -> list[str]:
        names = sorted(path.name for path in folder.iterdir() if path.is_dir())
        if not names:
            raise UserError(f"data.root: there is no class in {folder}; put images into {folder}/<class>/")
        return names

    def _samples(self, name: str) -> list[tuple[Path, int]]:
        folder = self._folder(name)
        label = {known: index for index, known in enumerate(self.class_names)}
        samples = []
        for found in self._classes(folder):
            if found in self._known and found not in label:
                continue  # a class that was not chosen
            if found not in label:
                raise UserError(f"data.root: {folder / found} is a class that {self.root / 'train'} does not have")
            paths = image_paths(folder / found)
            if not paths:
                raise UserError(f"data.root: there is no image in {folder / found}")
            samples += [(path, label[found]) for path in paths]
        return samples
