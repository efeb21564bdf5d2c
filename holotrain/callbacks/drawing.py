"""Pictures and texts for loggers: images with captions, matrices, tables of texts. Pillow draws them."""

from collections.abc import Iterable, Sequence

import numpy as np
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from PIL import Image, ImageDraw, ImageFont


def log_image(loggers: Iterable[Logger], tag: str, image: Image.Image, step: int) -> None:
    """To TensorBoard, and to loggers that have Lightning's ``log_image``, such as WandbLogger. Others skip it."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image(tag, np.asarray(image.convert("RGB")), step, dataformats="HWC")
        elif (log := getattr(logger, "log_image", None)) is not None:
            log(key=tag, images=[image], step=step)


def log_text(loggers: Iterable[Logger], tag: str, columns: Sequence[str], rows: Sequence[Sequence[str]], step: int) -> None:
    """A table of texts, to the same loggers (``log_text``).

    In TensorBoard, which reads Markdown, each text stands verbatim below the name of its column.
    """
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text(tag, markdown(columns, rows), step)
        elif (log := getattr(logger, "log_text", None)) is not None:
            log(key=tag, columns=list(columns), data=[list(row) for row in rows], step=step)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Every text as a code block, which Markdown leaves as it is: indented by four spaces.

    The headings are underlined, so that they are headings without Markdown too: the report page shows none.
    """
    blocks = []
    for row in rows:
        for column, text in zip(columns, row, strict=True):
            lines = "\n".join(f"    {line}" for line in text.splitlines() or [""])
            blocks.append(f"{column}\n{'-' * len(column)}\n\n{lines}")
    return "\n\n".join(blocks)


WHITE, INK, FAINT, GREEN, RED = "#ffffff", "#1c2330", "#667085", "#1d7a43", "#c0392b"
BLUE = np.array([31, 92, 168])

TILE, TEXT = 128, 13
"""Size of an image in a grid, and of its text, in pixels."""


def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def shortened(text: str, width: float, size: int) -> str:
    """The text, or as much of its beginning as fits into ``width`` pixels, with an ellipsis."""
    written = font(size)
    if written.getlength(text) <= width:
        return text
    while text and written.getlength(f"{text}…") > width:
        text = text[:-1]
    return f"{text}…"


def grid(images: Sequence[Image.Image], captions: Sequence[Sequence[tuple[str, str, str]]]) -> Image.Image:
    """Images in rows of three, each above its caption.

    Args:
        captions: for each image, lines of (text, end, colour); the text is cut if both do not fit, the end is not.
    """
    columns = min(3, len(images))
    gap, line = 12, TEXT + 5
    height = TILE + line * max(map(len, captions)) + gap
    width = TILE + gap
    canvas = Image.new("RGB", (columns * width + gap, -(-len(images) // columns) * height + gap), WHITE)
    draw = ImageDraw.Draw(canvas)
    for place, (image, caption) in enumerate(zip(images, captions, strict=True)):
        x, y = gap + place % columns * width, gap + place // columns * height
        shown = fitted(image)
        canvas.paste(shown, (x + (TILE - shown.width) // 2, y + (TILE - shown.height) // 2))
        for number, (text, end, colour) in enumerate(caption):
            text = shortened(text, TILE - font(TEXT).getlength(end), TEXT) + end
            draw.text((x, y + TILE + 3 + number * line), text, colour, font(TEXT))
    return canvas


def fitted(image: Image.Image) -> Image.Image:
    """At most ``TILE`` pixels wide and high. Small images are enlarged by a whole factor, so that pixels stay squares."""
    longest = max(image.size)
    if longest <= TILE:
        return image.resize([TILE // longest * side for side in image.size], Image.Resampling.NEAREST)
    return image.resize([max(side * TILE // longest, 1) for side in image.size], Image.Resampling.LANCZOS)


def matrix(counts: np.ndarray, names: Sequence[str]) -> Image.Image:
    """A confusion matrix: rows are classes, columns predictions, colours and figures the percentage of the row.

    Args:
        counts: (K, K)
        names: of the K classes; every n-th is written if there is no room for all.
    """
    classes = len(names)
    cell = min(max(640 // classes, 8), 56)
    size = min(max(cell * 2 // 5, 10), 22)  # TensorBoard shows the picture at about half its size
    every = -(-(size + 3) // cell)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    labels = [shortened(name, 150, size) for name in names]
    longest = int(max(font(size).getlength(label) for label in labels)) + 1
    upright = every == 1 and longest <= cell - 4  # column names are turned where they are wider than their cells
    gap, title = 8, size + 9
    left = title + longest + gap
    top = title + (size + 4 if upright else longest) + gap
    side = cell * classes
    canvas = Image.new("RGB", (left + side + 2 * gap, top + side + 2 * gap), WHITE)
    tints = shares**0.6  # so that small shares can be seen
    colours = (255 + tints[..., None] * (BLUE - 255)).round().astype(np.uint8)
    canvas.paste(Image.fromarray(colours).resize((side, side), Image.Resampling.NEAREST), (left, top))
    draw = ImageDraw.Draw(canvas)
    draw.rectangle((left - 1, top - 1, left + side, top + side), outline=FAINT)
    draw.text((left + side / 2, 4), "predicted", FAINT, font(size), anchor="mt")
    paste_turned(canvas, "class", FAINT, size, (4, top + side // 2))
    for place in range(0, classes, every):
        middle = round((place + 0.5) * cell)
        draw.text((left - gap, top + middle), labels[place], INK, font(size), anchor="rm")
        if upright:
            draw.text((left + middle, top - gap), labels[place], INK, font(size), anchor="md")
        else:
            paste_turned(canvas, labels[place], INK, size, (left + middle - size // 2 - 1, top - gap), "bottom")
    if cell >= 26:
        for row, column in zip(*shares.nonzero(), strict=True):
            share = shares[row, column]
            text = f"{100 * share:.0f}" if share >= 0.005 else "<1"
            at = (left + (column + 0.5) * cell, top + (row + 0.5) * cell)
            draw.text(at, text, WHITE if tints[row, column] > 0.55 else INK, font(size), anchor="mm")
    return canvas


def paste_turned(canvas: Image.Image, text: str, colour: str, size: int, at: tuple[int, int], anchor: str = "middle") -> None:
    """Text from bottom to top; ``at`` is the left end of its line box, and its middle or bottom."""
    box = Image.new("RGB", (int(font(size).getlength(text)) + 1, size + 4), WHITE)
    ImageDraw.Draw(box).text((0, 0), text, colour, font(size))
    box = box.rotate(90, expand=True)
    canvas.paste(box, (at[0], at[1] - (box.height if anchor == "bottom" else box.height // 2)))
