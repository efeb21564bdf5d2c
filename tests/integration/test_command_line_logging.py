"""At which steps a run's scalars stand."""

from pathlib import Path

import pytest
from left_by_runs import only, summary
from small_run import SMALL
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def steps(folder):
    """The steps at which each scalar stands."""
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_what_is_measured_stands_at_the_step_of_its_weights_and_no_curve_is_drawn_by_step_if_none_is_wanted(holotrain):
    status, out, err = holotrain("fit", *SMALL, "trainer.log_every_n_steps=0", "callbacks.checkpoint.monitor=val/loss")
    assert (status, err) == (0, "") and "train/loss" in out
    folder = only(Path("runs/fit"))
    found, left = steps(folder), summary(folder)
    assert {tag for tag in found if "/" in tag} == {"val/loss", "val/accuracy", "best/val/loss", "test/loss", "test/accuracy"}
    assert left["samples_per_second"] > 0 and left["step_seconds"] > 0 and left["peak_memory_bytes"] > 2**20
    best = int(Path(left["checkpoint"]).stem.partition("step")[2])
    assert best in (3, 6) and found["test/loss"] == found["test/accuracy"] == [best]
    for command, split in (("test", "test"), ("validate", "val")):
        assert holotrain(command, f"ckpt_path={folder}/checkpoints/last.ckpt")[0] == 0
        found = steps(only(Path("runs") / command))
        assert found == {f"{split}/loss": [6], f"{split}/accuracy": [6]}
    assert holotrain("test", f"ckpt_path={folder}/checkpoints/last.ckpt", "logger=none", "output_dir=mute")[0] == 0
    assert [path.name for path in only(Path("mute/test")).iterdir()] == ["summary.json"]


@pytest.mark.parametrize("count", ["-1", "0.5"])
def test_an_impossible_period_is_answered_in_a_line(holotrain, count):
    status, _, err = holotrain("fit", *SMALL, f"trainer.log_every_n_steps={count}")
    assert status == 2 and "trainer.log_every_n_steps" in err and err.count("\n") == 1
