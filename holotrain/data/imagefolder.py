"""Images with one folder for each class, the layout of ImageNet."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from torch.utils.data import Dataset

from holotrain.data.classes import chosen_classes
from holotrain.data.files import LabelledFiles, image_paths
from holotrain.data.images import SizedImages
from holotrain.errors import UserError
from holotrain.ranges import require_one_of


class ImageFolder(SizedImages):
    """``root/train/<class>/*``, ``root/val/<class>/*`` and ``root/test/<class>/*``. Without a test folder, val is tested.

    Args:
        root: folder with train/<class>/*, val/<class>/* and, optionally, test/<class>/*
        on_corrupt: what to do with an unreadable image: error (end the run) or skip (warn and leave it out)
        classes: classes to keep, by name or number, such as [0, 1]; []: all
        options: those of :class:`~holotrain.data.images.SizedImages`

    Raises:
        ValueError: a value out of range.
        UserError: a folder is missing, a class is empty, there is only one class, or
            val or test has a class that train does not have.
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
        self.root = Path(root)
        self.on_corrupt = on_corrupt
        self._known = self._classes(self._folder("train"))
        self.class_names = [self._known[index] for index in chosen_classes(classes, self._known)]
        self.num_classes = len(self.class_names)
        if self.num_classes < 2:
            raise UserError(f"data.root: {self.root / 'train'} holds one class; at least two are needed")

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
