"""Reads the TensorBoard event files of a run."""

from pathlib import Path

from google.protobuf.message import DecodeError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from holotrain.errors import UserError

KEPT = {"scalars": 0, "images": 1, "tensors": 1, "histograms": 1, "compressedHistograms": 1, "audio": 1}
"""Events to keep of each tag, including the last; 0: all."""


def read_events(folder: Path) -> EventAccumulator | None:
    """All scalars of a run and the last of everything else; None if it has no event file.

    Raises:
        UserError: a file cannot be read.
    """
    folder = folder / "tensorboard"
    paths = sorted(folder.glob("*tfevents*"))
    for path in paths:
        _check(path)
    if not paths:
        return None
    try:
        return EventAccumulator(str(folder), size_guidance=KEPT).Reload()
    except Exception as error:  # TensorBoard raises many kinds for events of other shapes
        raise UserError(f"{folder} has an unreadable event file: {error}") from error


def _check(path: Path) -> None:
    """TensorBoard skips unreadable files; here they raise. Empty and truncated files are accepted, as in TensorBoard."""
    try:
        with path.open("rb") as file:
            empty = not file.read(1)
        readable = empty or next(iter(EventFileLoader(str(path)).Load()), None) is not None
    except (OSError, DecodeError):
        readable = False
    if not readable:
        raise UserError(f"{path} is not a readable event file")
