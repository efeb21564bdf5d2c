"""Logs images and text to the loggers that can show them."""

from collections.abc import Iterable, Sequence

import numpy as np
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from PIL import Image


def log_image(loggers: Iterable[Logger], tag: str, image: Image.Image, step: int) -> None:
    """To TensorBoard, and to loggers that have Lightning's ``log_image``, such as WandbLogger. Others skip it."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image(tag, np.asarray(image.convert("RGB")), step, dataformats="HWC")
        elif hasattr(logger, "log_image"):
            logger.log_image(key=tag, images=[image], step=step)


def log_text(loggers: Iterable[Logger], tag: str, columns: Sequence[str], rows: Sequence[Sequence[str]], step: int) -> None:
    """A table of texts, to the same loggers (``log_text``).

    In TensorBoard, which reads Markdown, each text stands verbatim below the name of its column.
    """
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text(tag, markdown(columns, rows), step)
        elif hasattr(logger, "log_text"):
            logger.log_text(key=tag, columns=list(columns), data=[list(row) for row in rows], step=step)


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
