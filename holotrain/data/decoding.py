"""Decodes images that anybody may have made: in this process, of a few formats, and up to a number of pixels."""

from contextlib import suppress
from pathlib import Path
from typing import BinaryIO
from warnings import catch_warnings

from PIL import Image, ImageOps, UnidentifiedImageError, features

from holotrain.errors import UserError
from holotrain.files import open_regular

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP", *(["AVIF"] if features.check("avif") else []))
"""Those that Pillow decodes itself. For PostScript, whatever the file is called, it starts Ghostscript."""

EXTENSIONS = {".jpg", ".jpeg", ".jfif", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif", ".avif"}
"""Of the files in a folder that are read as images; the first frame of an animation."""

UNREADABLE = (OSError, SyntaxError, ValueError)
"""What :func:`decoded` raises for a file that is no image, damaged or too large."""

MEGAPIXELS = 89.5
"""Pillow warns of images with more; a file of 20 kB may claim to be one."""


def read_image(path: Path, megapixels: float = MEGAPIXELS) -> Image.Image:
    """The image in a file. Raises a UserError if it cannot be read, is damaged, or is larger than ``megapixels``."""
    try:
        with open_regular(path) as file:
            return decoded(file, megapixels)
    except UNREADABLE as error:
        raise UserError(f"{path} is not a readable image ({error})") from error


def decoded(file: BinaryIO, megapixels: float) -> Image.Image:
    """The image in a file. Palettes, transparency and other colour spaces become RGB; grey values keep their 8 or 16 bits.

    Floating-point values are left as they are: they should be in [0, 1].

    Raises:
        OSError, SyntaxError, ValueError: it is damaged, of another format or larger, or Pillow cannot convert it.
    """
    before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, int(megapixels * 1e6)
    refusing = catch_warnings(action="error", category=Image.DecompressionBombWarning)
    try:
        with refusing, Image.open(file, formats=FORMATS) as image:
            return _grey_or_rgb(image)
    except UnidentifiedImageError as error:
        raise ValueError(f"it is none of {', '.join(FORMATS)}") from error
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise ValueError(f"it is larger than data.max_megapixels={megapixels:g}") from error
    finally:
        Image.MAX_IMAGE_PIXELS = before


def _grey_or_rgb(image: Image.Image) -> Image.Image:
    image.load()
    if image.mode in ("RGB", "L", "I;16", "F"):
        return image
    if image.mode.startswith("I"):  # 16 bits in the other order of bytes, or held in 32
        return image.convert("I").convert("I;16")
    if "transparency" in image.info:  # else Pillow warns about palettes with several transparent colours
        image = image.convert("RGBA")
    return image.convert("RGB")


def upright(image: Image.Image) -> Image.Image:
    """Turns the image as its EXIF data say that it was held, in place; not if they are damaged."""
    with suppress(Exception):  # Pillow parses them with few checks, and raises anything
        ImageOps.exif_transpose(image, in_place=True)
    return image
