"""Reads the scalars of a run from TensorBoard event files or csv."""

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from holotrain.dashboard.events import read_events
from holotrain.errors import UserError


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
    return {**_csv(folder / "csv"), **_tensorboard(events or read_events(folder))}


def _tensorboard(events: EventAccumulator | None) -> dict[str, Curve]:
    if events is None:
        return {}
    rows = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    return {
        tag: _curve([e.step for e in points], [e.value for e in points], [e.wall_time for e in points])
        for tag, points in rows.items()
    }


def _csv(folder: Path) -> dict[str, Curve]:
    found: dict[str, tuple[list[int], list[float]]] = {}
    # A resumed run writes a new version.
    versions = {path: path.parent.name.removeprefix("version_") for path in folder.glob("version_*/metrics.csv")}
    for path in sorted((path for path in versions if versions[path].isdecimal()), key=lambda path: int(versions[path])):
        try:
            with path.open(newline="", encoding="utf-8") as file:
                for row in csv.DictReader(file):
                    for tag in row.keys() - {"step"}:
                        if row[tag]:
                            steps, values = found.setdefault(tag, ([], []))
                            steps.append(int(row["step"]))
                            values.append(float(row[tag]))
        except (OSError, ValueError, TypeError, KeyError, csv.Error) as error:
            raise UserError(f"{path} is not a readable csv log") from error
    return {tag: _curve(*columns) for tag, columns in found.items()}


def _curve(steps: list[int], values: list[float], instants: list[float] | None = None) -> Curve:
    """Sorted by step, with the last point of each step."""
    backwards = np.asarray(steps)[::-1]
    unique, first = np.unique(backwards, return_index=True)
    kept = len(backwards) - 1 - first
    return Curve(unique, np.asarray(values, np.float64)[kept], None if instants is None else np.asarray(instants)[kept])
