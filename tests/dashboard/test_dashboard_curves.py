"""Curves: read back from what runs left."""

import struct
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

from holotrain.dashboard.logs import read_events, read_images, read_scalars
from holotrain.errors import UserError


def logged(folder: Path, points: list[tuple[int, float]], tag: str = "train/loss") -> Path:
    """The event file that it wrote."""
    writer = SummaryWriter(folder / "tensorboard")
    for step, value in points:
        writer.add_scalar(tag, value, step, walltime=1e9 + step)
    writer.close()
    return max((folder / "tensorboard").iterdir(), key=lambda path: (path.stat().st_mtime, path.name))


def test_a_resumed_run_counts_once(tmp_path):
    logged(tmp_path, [(0, 3.0), (1, 2.0), (2, 9.0)])
    first = next((tmp_path / "tensorboard").iterdir())
    first.rename(first.with_name("events.out.tfevents.0000000001.first"))  # the names' seconds would be the same
    logged(tmp_path, [(2, 1.0), (3, 0.5)])
    curve = read_scalars(tmp_path)["train/loss"]
    assert curve.steps.tolist() == [0, 1, 2, 3] and curve.values.tolist() == [3.0, 2.0, 1.0, 0.5]
    assert curve.instants.tolist() == [1e9, 1e9 + 1, 1e9 + 2, 1e9 + 3]


def test_a_file_cut_off_is_read_as_far_as_it_goes_and_another_is_refused(tmp_path):
    path = logged(tmp_path, [(step, 1.0) for step in range(10)])
    path.write_bytes(path.read_bytes()[:-7])
    assert len(read_scalars(tmp_path)["train/loss"].steps) == 9
    path.write_bytes(b"no event file, but long enough to look at")
    with pytest.raises(UserError, match=f"{path.name} is not a readable event file"):
        read_scalars(tmp_path)
    path.write_bytes(b"")
    assert read_scalars(tmp_path) == {}


def test_an_event_that_claims_any_size_is_refused(tmp_path):
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    path = logged(tmp_path, [(0, 1.0)])
    for size in (2**34, 2**63):
        claimed = struct.pack("<Q", size)
        path.write_bytes(claimed + struct.pack("<I", masked_crc32c(claimed)) + b"0123456789")
        with suppress(UserError):  # an event that is cut off is left out
            assert read_scalars(tmp_path) == {}


def test_a_csv_log_with_many_names_is_read_as_fast_as_its_rows(tmp_path):
    """Its 10^5 names times 10^4 rows would take minutes."""
    path = tmp_path / "csv/version_0/metrics.csv"
    path.parent.mkdir(parents=True)
    path.write_text(f"step,{','.join(map(str, range(10**5)))}\n" + "1,2\n" * 10**4)
    begun = time.monotonic()
    assert read_scalars(tmp_path)["0"].values.tolist() == [2.0] and time.monotonic() - begun < 60


def test_csv_logs_are_read_too(tmp_path):
    for version, rows in enumerate(["0,,3.5\n1,0.25,\n", "1,,2.5\n2,,1.5\n"]):
        path = tmp_path / "csv" / f"version_{version}" / "metrics.csv"
        path.parent.mkdir(parents=True)
        path.write_text(f"step,val/accuracy,train/loss\n{rows}")
    curves = read_scalars(tmp_path)
    assert curves["train/loss"].steps.tolist() == [0, 1, 2] and curves["train/loss"].values.tolist() == [3.5, 2.5, 1.5]
    assert curves["val/accuracy"].values.tolist() == [0.25] and curves["val/accuracy"].instants is None
    path.write_text("step,train/loss\nx,y\n")
    with pytest.raises(UserError, match="metrics.csv is not a readable csv log"):
        read_scalars(tmp_path)


def test_a_copy_of_a_csv_log_is_no_version(tmp_path):
    for name, value in (("version_9", 1), ("version_10", 2), ("version_9_old", 99), ("version_x", "damaged")):
        path = tmp_path / "csv" / name / "metrics.csv"
        path.parent.mkdir(parents=True)
        path.write_text(f"step,train/loss\n1,{value}\n")
    assert read_scalars(tmp_path)["train/loss"].values.tolist() == [2]


def test_what_a_restart_took_back_is_left_out(tmp_path):
    """TensorBoard then knows the tag, and no value of it."""
    for number, purge in enumerate((None, 6)):
        writer = SummaryWriter(tmp_path / "tensorboard", purge_step=purge, filename_suffix=f".{number}")
        writer.add_scalar("train/loss", 1.0, purge or 1)
        if purge is None:
            writer.add_scalar("val/loss", 1.0, 10)
            writer.add_image("samples", np.zeros((3, 4, 4), np.uint8), 10)
        writer.close()
    first, second = sorted((tmp_path / "tensorboard").iterdir(), key=lambda path: path.suffix)
    first.rename(first.with_name("events.out.tfevents.1"))  # in the order of their names, which hold the second
    second.rename(second.with_name("events.out.tfevents.2"))
    events = read_events(tmp_path)
    assert "samples" in events.Tags()["images"] and read_images(events) == {}
    assert list(read_scalars(tmp_path, events)) == ["train/loss"]
