"""Images of the Hugging Face Hub, of folders that ``save_to_disk`` wrote, and of files that the datasets library reads."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import torch
from PIL import Image
from torch.utils.data import Dataset

from holotrain.data.decoding import UNREADABLE, decoded
from holotrain.data.hub import FromHub, class_names, column, in_order
from holotrain.data.images import ChosenClasses, SizedImages
from holotrain.errors import UserError
from holotrain.files import open_regular, require_inside

if TYPE_CHECKING:
    from datasets import Dataset as Rows


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
