"""Image files, and what to do if one cannot be read."""

import warnings
from collections.abc import Callable
from pathlib import Path

from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset

from holotrain.errors import UserError

EXTENSIONS = {".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"}


def read_image(path: Path) -> Image.Image:
    """Reads a whole image file.

    Raises:
        UserError: it cannot be read, or is damaged or truncated.
    """
    try:
        with Image.open(path) as image:
            image.load()
            return image
    except (OSError, SyntaxError, ValueError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise UserError(f"{path} is not a readable image ({error})") from error


def image_paths(folder: Path) -> list[Path]:
    """The image files below a folder, sorted by name."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in EXTENSIONS and path.is_file())


class ImageFiles(Dataset):
    """The image at a path, or all images below it, as (transformed image, path).

    For a file that cannot be read it warns, and gives a blank image without a path: the others are still worth having.

    Raises:
        UserError: there is no image.
    """

    def __init__(self, path: Path, transform: Callable[[Image.Image], Tensor]) -> None:
        if not path.exists():
            raise UserError(f"images: there is no file or folder {path}")
        self.paths = [path] if path.is_file() else image_paths(path)
        if not self.paths:
            raise UserError(f"images: there is no image in {path}; known extensions are {', '.join(sorted(EXTENSIONS))}")
        self.transform = transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, str]:
        path = self.paths[index]
        try:
            return self.transform(read_image(path)), str(path)
        except UserError as error:
            warnings.warn(f"left out: {error}", stacklevel=2)
            return self.transform(Image.new("RGB", (1, 1))), ""


class LabelledFiles(Dataset):
    """Image files with labels: (image, label).

    Args:
        samples: path and label of each file.
        on_corrupt: ``"error"`` raises a UserError that names the file. ``"skip"`` warns and returns the next readable image
            instead (after the last, the first), so that the length does not change and batches and resuming still work.
    """

    def __init__(self, samples: list[tuple[Path, int]], on_corrupt: str = "error") -> None:
        self.samples = samples
        self.on_corrupt = on_corrupt

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        for offset in range(len(self.samples)):
            path, label = self.samples[(index + offset) % len(self.samples)]
            try:
                return read_image(path), label
            except UserError as error:
                if self.on_corrupt == "error":
                    raise UserError(f"data: {error}; data.on_corrupt=skip leaves such images out") from error
                warnings.warn(f"skipped: {error}", stacklevel=2)  # shown once per file
        raise UserError("data: there is no readable image")
