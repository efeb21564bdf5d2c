"""Decodes images that anybody may have made: in this process, of a few formats, and up to Pillow's limit of pixels."""

from pathlib import Path
from typing import BinaryIO

from PIL import Image, UnidentifiedImageError, features

from holotrain.errors import UserError
from holotrain.files import open_regular

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP", *(["AVIF"] if features.check("avif") else []))
"""Those that Pillow decodes itself. For PostScript, whatever the file is called, it starts Ghostscript."""

EXTENSIONS = {".jpg", ".jpeg", ".jfif", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif", ".avif"}
"""Of the files in a folder that are read as images; the first frame of an animation."""

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
