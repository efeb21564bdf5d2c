"""Wrong command lines are answered in a line or two: a smoke test, for refusals are tested where they are raised."""

import os
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from failures.wrong_command_lines import WRONG
from small_run import SMALL

OWN = Path(__file__).parents[1] / "own_classes"


@pytest.fixture
def typed(holotrain, image_run, monkeypatch):
    """Runs a command line in this process, in the folder that ``wrong_command_lines`` describes."""
    Path("run").symlink_to(image_run)
    Path("text.ckpt").write_text("no checkpoint")
    Path("empty").mkdir()
    os.mkfifo("pipe.ckpt")
    Path("full").mkdir()
    Path("full/mine").write_text("a file")
    shutil.copytree(OWN / "conf", "mine")
    monkeypatch.syspath_prepend(OWN)
    return lambda line: holotrain(*shlex.split(line))


def files() -> list[Path]:
    """But for caches of data."""
    return sorted(path for path in Path().rglob("*") if path.is_file() and path.parts[0] not in ("data", "runs"))


@pytest.mark.parametrize(("line", "message"), WRONG, ids=[line[-60:] for line, _ in WRONG])
def test_a_wrong_command_line_is_answered_in_a_line_or_two(typed, line, message):
    before = files()
    status, out, err = typed(line)
    assert status == 2 and (out == "" or "auto" in line)  # a batch size or schedules are planned first
    assert message in err and err.startswith("holotrain: ")
    assert err.count("\n") <= 2 and "Traceback" not in err
    assert not list(Path().glob("runs/fit/20*")) and files() == before  # a run that did not begin leaves no folder


def test_of_two_values_the_last_is_taken(holotrain):
    shown = holotrain.done("fit", "--cfg", "job", "optimizer.lr=1", "optimizer.lr=2", "seed=3", "++seed=4")
    assert yaml.safe_load(shown)["optimizer"]["lr"] == 2 and yaml.safe_load(shown)["seed"] == 4


def test_a_group_that_is_left_out_first_is_replaced(holotrain):
    words = ["~data", "+data._target_=holotrain.data.Digits", "experiment=digits_vit_tiny", "model=rev_vit_tiny"]
    assert "RevViT" in holotrain.done("fit", "--cfg", "job", *words)  # what an experiment chooses is not given on the line


def test_less_than_one_batch_is_refused_when_the_data_are_read(holotrain):
    expected = "holotrain: fit: You requested to check 0.0001 of the"
    assert holotrain.refused("fit", "trainer.limit_val_batches=0.0001", "logger=none").startswith(expected)


def test_names_in_brackets_and_interpolations_mean_what_they_say(holotrain):
    words = ["output_dir=[/red]", "optimizer.weight_decay=${optimizer.lr}", "callbacks.progress=null"]
    status, out, _ = holotrain("fit", *SMALL, *words, "optimizer.lr=0.125", "test=false", "logger=none")
    assert status == 0 and "[/red]/fit/" in out
    (kept,) = Path("[/red]/fit").glob("*/config.yaml")
    assert yaml.safe_load(kept.read_text())["optimizer"]["weight_decay"] == 0.125
