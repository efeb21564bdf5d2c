"""Reads the files in run folders."""

import csv
import json
from pathlib import Path

import torch
from compared import assert_equal
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from holotrain.models.checkpoint_files import read


def only(folder: Path) -> Path:
    (path,) = (entry for entry in folder.iterdir() if entry.name != "sweeps")
    return path


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def rows(table: Path) -> list[dict[str, str]]:
    """Of a table in CSV."""
    return list(csv.DictReader(table.open()))


def scalars(folder: Path) -> dict[str, list[float]]:
    """Of each tag, by step: files of several processes are read in any order."""
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {
        tag: [event.value for event in sorted(events.Scalars(tag), key=lambda one: one.step)]
        for tag in events.Tags()["scalars"]
    }


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Of a file, or of a folder that several processes wrote."""
    return read(checkpoint, ["state_dict"])["state_dict"]


def assert_same_weights(left: Path, right: Path) -> None:
    one, other = weights(left), weights(right)
    assert list(one) == list(other)
    assert_equal(other, one)
