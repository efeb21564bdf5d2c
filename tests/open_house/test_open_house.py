"""A user's own classes, from the command line, without a change in holotrain."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from left_by_runs import assert_same_weights, only, scalars
from small_run import SMALL, fit_and_kill

HERE = Path(__file__).parent
WORDS = [*SMALL, "--config-dir", "conf", "experiment=guest", "callbacks.progress=none", "trainer.limit_train_batches=5"]


@pytest.fixture
def house(holotrain, tmp_path, monkeypatch):
    """The command line, in a folder with the user's package and YAML files."""
    shutil.copy(HERE / "house_guest.py", tmp_path)
    shutil.copytree(HERE / "conf", tmp_path / "conf")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "house_guest", raising=False)
    return holotrain


def test_an_optimizer_a_schedule_and_a_callback_train(house):
    status, out, err = house("fit", *WORDS, "optimizer.weight_decay=0.1", "scheduler.times=3")
    assert (status, err) == (0, "") and "lion, learning rate 0.001" in out
    folder = only(Path("runs/fit"))
    assert scalars(folder)["diary/count"] == [5, 10]
    rates = [round(1e-3 / rate) for rate in scalars(folder)["train/lr"]]
    assert rates == [1, 1, 1, 2, 2, 4, 4, 4, 8, 8]
    checkpoint = torch.load(folder / "checkpoints/last.ckpt", weights_only=True)
    assert [group["weight_decay"] for group in checkpoint["optimizer_states"][0]["param_groups"]] == [0.1, 0.0]


def test_a_killed_run_resumes_to_the_same_weights(house, tmp_path):
    assert house("fit", *WORDS, "output_dir=whole")[0] == 0
    fit_and_kill(tmp_path, *WORDS, "output_dir=killed", "callbacks.checkpoint.every_n_train_steps=2")
    status, _, err = house("fit", "--config-dir", "conf", "resume=true", "output_dir=killed")
    assert (status, err) == (0, "")
    last = "checkpoints/last.ckpt"
    assert_same_weights(only(Path("whole/fit")) / last, only(Path("killed/fit")) / last)
    assert scalars(only(Path("killed/fit")))["diary/count"][-1] == 10


def test_a_checkpoint_names_classes_only_where_the_user_does_too(house):
    assert house("fit", *WORDS, "hydra.run.dir=run")[0] == 0
    words = ["test", "ckpt_path=run/checkpoints/last.ckpt"]
    status, _, err = house(*words)
    assert status == 2 and err.count("\n") == 1
    assert "names 'house_guest.Lion' as optimizer" in err and "trust=house_guest" in err
    named = {"optimizer": "Lion", "scheduler": "halving", "callbacks.diary": "Diary"}
    on_the_line = [f"{key}._target_=house_guest.{name}" for key, name in named.items()]
    for allowed in (["trust=house_guest"], ["--config-dir", "conf"], [*on_the_line, "optimizer.lr=1"]):
        status, _, err = house(*words, *allowed)
        assert (status, err) == (0, "")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["optimizer.lrr=1"], "optimizer.lrr: there is no 'lrr' in optimizer. Did you mean 'lr'?"),
        (["optimizer.lr=fast"], "optimizer.lr: 'fast' is not a number"),
        (["optimizer.lr=0"], "optimizer: lr 0.0 must be above 0"),
        (["scheduler.times=0.5"], "scheduler.times: 0.5 is not a whole number"),
        (
            ["callbacks.diary.kind=batch"],
            "'batch' is not one of batches, epochs. Did you mean 'batches'?",
        ),
        (
            ["optimizer._target_=house_guest.Lyon"],
            "there is no 'Lyon' in house_guest. Did you mean 'Lion'?",
        ),
        (["optimizer._target_=house_guests.Lion"], "optimizer._target_: there is no package 'house_guests'"),
    ],
)
def test_mistakes_are_answered_in_a_line(house, words, expected):
    status, _, err = house("fit", *WORDS, *words)
    assert status == 2 and expected in err and err.count("\n") == 1


def test_its_options_are_in_the_help(house):
    status, out, _ = house("fit", "--config-dir", "conf", "experiment=guest", "--help")
    assert status == 0
    assert "optimizer.betas=[0.9,0.99]" in out and "weights of the momentum in the step" in out and "how often" in out
