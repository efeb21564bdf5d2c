"""Reads what a run has logged: its scalars, from TensorBoard event files or csv, and the last image and text of each tag.

Event files are data that may come from anywhere. So only PNG and JPEG are read, recognised by their first bytes, and sizes are
limited; the page shows texts as plain text.
"""

import csv
from base64 import b64encode
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from holotrain.errors import UserError
from holotrain.files import regular_size

KEPT = {"scalars": 0, "images": 1, "tensors": 1, "histograms": 1, "compressedHistograms": 1, "audio": 1}
"""Events to keep of each tag, including the last; 0: all."""

KINDS = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}
"""Kinds of images by their first bytes."""

MOST_EVENTS, MOST_ROWS = 2**32, 2**28
"""Bytes of a file of events, and of one of csv."""

TAGS, IMAGE_BYTES, CHARACTERS = 12, 2**20, 10_000
"""Limits for each run: tags of images and of texts; the size of an image, which is left out if larger; the length of a text."""


def read_events(folder: Path) -> EventAccumulator:
    """All scalars of a run and the last of everything else; nothing if it has no event file.

    Raises:
        UserError: a file cannot be read, or is too large. (TensorBoard skips it.) Empty and truncated files are accepted.
    """
    folder = folder / "tensorboard"
    paths = sorted(folder.glob("*tfevents*"))
    for path in paths:
        try:
            size = regular_size(path, MOST_EVENTS)
            readable = not size or next(iter(EventFileLoader(str(path)).Load()), None) is not None
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is not a readable event file: {getattr(error, 'strerror', None) or error}") from error
        except (DecodeError, MemoryError, OverflowError):  # an event may claim any size
            readable = False
        if not readable:
            raise UserError(f"{path} is not a readable event file")
    events = EventAccumulator(str(folder), size_guidance=KEPT)
    try:
        return events.Reload() if paths else events
    except Exception as error:  # TensorBoard raises many kinds for events of other shapes
        raise UserError(f"{folder} has an unreadable event file: {error}") from error


@dataclass
class Curve:
    """A scalar over a run.

    Args:
        steps: (N,) optimizer steps, ascending, each once.
        values: (N,)
        instants: (N,) Unix time of each point, in seconds; None: not known.
    """

    steps: np.ndarray
    values: np.ndarray
    instants: np.ndarray | None = None

    def finite(self) -> "Curve":
        """The curve without infinite and NaN points."""
        kept = np.isfinite(self.values)
        return Curve(self.steps[kept], self.values[kept], None if self.instants is None else self.instants[kept])


def read_scalars(folder: Path, events: EventAccumulator | None = None) -> dict[str, Curve]:
    """The scalars of a run by tag; empty if it has none. Points of a resumed run replace earlier ones.

    Args:
        events: of the run, if they have been read already.

    Raises:
        UserError: a file cannot be read.
    """
    found, events = _csv(folder / "csv"), events or read_events(folder)
    for tag in events.Tags()["scalars"]:
        if points := events.Scalars(tag):
            found[tag] = _curve([e.step for e in points], [e.value for e in points], [e.wall_time for e in points])
    return found


def _csv(folder: Path) -> dict[str, Curve]:
    found: dict[str, tuple[list[int], list[float]]] = {}
    # A resumed run writes a new version: version_9, version_10. A folder such as version_9_old, a copy, is left out.
    versions = {path: path.parent.name.removeprefix("version_") for path in sorted(folder.glob("version_*/metrics.csv"))}
    for path in sorted((path for path in versions if versions[path].isdecimal()), key=lambda path: int(versions[path])):
        try:
            regular_size(path, MOST_ROWS)
            with path.open(newline="", encoding="utf-8") as file:
                rows = csv.reader(file)
                tags = next(rows, [])
                for row in rows:
                    values = dict(zip(tags, row, strict=False))
                    for tag in values.keys() - {"step"}:
                        if values[tag]:
                            curve = found.setdefault(tag, ([], []))
                            curve[0].append(int(values["step"]))
                            curve[1].append(float(values[tag]))
        except (OSError, ValueError, TypeError, KeyError, csv.Error) as error:
            raise UserError(f"{path} is not a readable csv log") from error
    return {tag: _curve(*columns) for tag, columns in found.items()}


def _curve(steps: list[int], values: list[float], instants: list[float] | None = None) -> Curve:
    """Sorted by step, with the last point of each step."""
    backwards = np.asarray(steps)[::-1]
    unique, first = np.unique(backwards, return_index=True)
    kept = len(backwards) - 1 - first
    return Curve(unique, np.asarray(values, np.float64)[kept], None if instants is None else np.asarray(instants)[kept])


@dataclass
class Medium:
    """An image or a text of a run.

    Args:
        step: at which it was logged.
        content: the text, or the image as a ``data:`` URI.
    """

    step: int
    content: str


def read_images(events: EventAccumulator) -> dict[str, Medium]:
    """The last image of each tag. Images that are too large or of another kind are left out."""
    found = {}
    for tag in sorted(events.Tags()["images"]):
        for last in events.Images(tag)[-1:]:  # none, if a restart before it took it back
            if uri := image_uri(last.encoded_image_string):
                found[tag] = Medium(last.step, uri)
    return dict(list(found.items())[:TAGS])


def image_uri(image: bytes) -> str | None:
    """None if it is too large, or neither PNG nor JPEG."""
    kind = next((kind for start, kind in KINDS.items() if image.startswith(start)), None)
    return f"data:{kind};base64,{b64encode(image).decode()}" if kind and len(image) <= IMAGE_BYTES else None


def read_texts(events: EventAccumulator) -> dict[str, Medium]:
    """The last text of each tag, cut after ``CHARACTERS``."""
    found = {}
    for tag in sorted(events.Tags()["tensors"]):
        about, last = events.summary_metadata.get(tag), events.Tensors(tag)[-1]
        if about is not None and about.plugin_data.plugin_name == "text" and last.tensor_proto.string_val:
            text = "\n".join(part.decode("utf-8", errors="replace") for part in last.tensor_proto.string_val)
            if len(text) > CHARACTERS:
                text = f"{text[:CHARACTERS]}\n... ({len(text) - CHARACTERS:,} more characters)"
            found[tag.removesuffix("/text_summary")] = Medium(last.step, text)
    return dict(list(found.items())[:TAGS])
