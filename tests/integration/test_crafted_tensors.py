"""Checkpoints whose tensors, counts or options nobody has written honestly are refused, in one line and at once."""

import os
import re
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from covering import slow
from made_once import made_once
from safetensors.torch import load_file, save_file
from small_run import SMALL, fit_in, run_in

pytestmark = pytest.mark.usefixtures("contacts_nobody")

WORDS = ["trainer.max_epochs=9", "logger=none", "test=false"]
HUGE = torch.zeros(1).expand(10**13)
HEAD = "model.head.weight"


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A folder with the checkpoint of a small training that averages its weights, and its export."""

    def make(folder):
        fit_in(folder, *SMALL, "callbacks=ema", "test=false", "logger=none", "hydra.run.dir=run")
        shutil.copy(folder / "run/checkpoints/last.ckpt", folder / "sound.ckpt")
        run_in(folder, "export", "ckpt_path=sound.ckpt", "to=export")
        shutil.rmtree(folder / "run")

    return made_once(tmp_path_factory, "crafted_tensors", make)


def weight(make: Callable) -> Callable:
    def change(held: dict) -> None:
        held["state_dict"][HEAD] = make(held["state_dict"][HEAD])

    return change


OTHER_NUMBERS = {
    "bool": weight(torch.Tensor.bool),
    "complex": weight(lambda w: w.to(torch.complex64)),
    "whole numbers": weight(torch.Tensor.long),
    "empty": weight(lambda w: w[:0]),
}


def averaged(make: Callable) -> Callable:
    def change(held: dict) -> None:
        held["current_model_state"][HEAD] = make(held["current_model_state"][HEAD])

    return change


def state(name: str, make: Callable) -> Callable:
    def change(held: dict) -> None:
        kept = held["optimizer_states"][0]["state"][0]
        kept[name] = make(kept[name])

    return change


def option(name: str, value: object) -> Callable:
    return lambda held: [group.update({name: value}) for group in held["optimizer_states"][0]["param_groups"]]


def without(name: str) -> Callable:
    return lambda held: [kept.pop(name) for kept in held["optimizer_states"][0]["state"].values()]


def schedule(name: str, value: object) -> Callable:
    return lambda held: held["lr_schedulers"][0].update({name: value})


def count(*path_and_value: object) -> Callable:
    *path, name, value = path_and_value

    def change(held: dict) -> None:
        node = held["loops"]["fit_loop"]
        for key in path:
            node = node[key]
        node[name] = value

    return change


def callback(name: str, value: object) -> Callable:
    return lambda held: [kept.update({name: value}) for kept in held["callbacks"].values()]


def at(name: str, value: object) -> Callable:
    return lambda held: held.update({name: value})


EPOCHS = ("epoch_progress", "current")
BATCHES = ("epoch_loop.batch_progress", "current")

STATES = {
    "an average of 10^13": averaged(lambda w: HUGE),
    "an average of bool": averaged(torch.Tensor.bool),
    "an average of another shape": averaged(lambda w: w[:1]),
    "an average that is a word": averaged(lambda w: "x"),
    "averages that are a list": at("current_model_state", [1]),
    "a state of 10^13": state("exp_avg", lambda x: HUGE),
    "a state of its shape that is one number": state("exp_avg", lambda x: x.new_zeros(1).expand(x.shape)),
    "a sparse state": state("exp_avg", torch.Tensor.to_sparse),
    "a state of another shape": state("exp_avg", lambda x: x[:1]),
    "a state that is a word": state("exp_avg", lambda x: "x"),
    "a state that is null": state("exp_avg_sq", lambda x: None),
    "no such state": without("exp_avg_sq"),
    "a step before the first": state("step", lambda x: torch.tensor(-1.0)),
    "a step that is no number": state("step", lambda x: torch.tensor(float("nan"))),
    "a step of several": state("step", lambda x: torch.ones(3)),
    "a rate that is a word": option("lr", "0.1"),
    "a rate that is null": option("lr", None),
    "a rate that is a list": option("lr", [0.1]),
    "a rate below 0": option("lr", -1.0),
    "a rate that is no number": option("lr", float("nan")),
    "betas above 1": option("betas", (2.0, 2.0)),
    "one beta": option("betas", (0.9,)),
    "a switch that is a word": option("amsgrad", "x"),
    "a switch that needs more": option("amsgrad", True),
    "a schedule of words": schedule("base_lrs", ["x", "y"]),
    "a schedule before the first step": schedule("last_epoch", -(10**12)),
    "a schedule with a method": schedule("get_lr", 5),
    "a schedule of another optimizer": schedule("optimizer", 5),
    "a score that is a word": callback("best_model_score", "x"),
    "scores that are words": callback("best_k_models", {"x": "y"}),
    "a path that is a number": callback("best_model_path", 5),
    "steps below 0": at("global_step", -(10**12)),
    "steps without end": at("global_step", 10**30),
    "other steps": at("global_step", 4),
    "epochs below 0": at("epoch", -1),
    "processed epochs below 0": count(*EPOCHS, "processed", -(10**12)),
    "processed epochs that are a fraction": count(*EPOCHS, "processed", 1.5),
    "processed epochs that are yes": count(*EPOCHS, "processed", True),
    "ready epochs without end": count(*EPOCHS, "ready", 10**30),
    "a method in place of a count": count(*EPOCHS, "reset", 5),
    "counts that are a list": count("epoch_progress", "total", [1]),
    "batches below 0": count(*BATCHES, "ready", -(10**12)),
    "batches that are a word": count(*BATCHES, "completed", "x"),
    "a last batch that is a number": count("epoch_loop.batch_progress", "is_last_batch", 5),
    "stepped batches below 0": count("epoch_loop.state_dict", "_batches_that_stepped", -(10**12)),
    "stepped batches that are a word": count("epoch_loop.state_dict", "_batches_that_stepped", "x"),
    "no count of steps": lambda held: held["loops"]["fit_loop"].pop("epoch_loop.automatic_optimization.optim_progress"),
    "a position that is a word": lambda held: held["exact_resume"]["random"][0]["loader"].update({"batches": "x"}),
    "a position below 0": lambda held: held["exact_resume"]["random"][0]["loader"].update({"epoch": -(10**12)}),
    "a loader that is a number": count("state_dict", "combined_loader", [5]),
    "a loader of words": count("state_dict", "combined_loader", [{"epoch": "x", "batches": 0}]),
    "loaders that are a number": count("state_dict", "combined_loader", 5),
}
"""Changes of what only a training that continues takes over."""


@pytest.fixture
def given(holotrain, trained):
    """Gives a changed checkpoint to a command, and returns the line that answers."""
    shutil.copytree(trained, ".", dirs_exist_ok=True)

    def give(change: Callable, *words: str) -> str:
        held = torch.load("sound.ckpt", weights_only=True)
        change(held)
        resumed = "resume=true" in words
        Path("run/checkpoints").mkdir(parents=True, exist_ok=True)
        torch.save(held, "run/checkpoints/last.ckpt" if resumed else "crafted.ckpt")
        return quickly_refused(holotrain, *words, "hydra.run.dir=run" if resumed else "ckpt_path=crafted.ckpt")

    return give


def quickly_refused(holotrain, *words: str) -> str:
    """The line, within seconds and little memory."""
    begun, limits = time.monotonic(), resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**31, limits[1]))
    try:
        said = holotrain.refused(*words)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert time.monotonic() - begun < 20
    return said


@pytest.mark.parametrize("case", OTHER_NUMBERS)
def test_weights_of_other_numbers(given, case):
    assert "holds another model: " in given(OTHER_NUMBERS[case], "test")


@pytest.mark.parametrize("case", STATES)
def test_what_a_training_takes_over(given, case):
    words = r"\.ckpt (is damaged, or of another|holds another model: )| (does|do) not fit: "
    assert re.search(words, given(STATES[case], "fit", *WORDS))


def test_what_other_callbacks_take_over(holotrain):
    words = [*SMALL, "callbacks=early_stopping", "test=false", "logger=none", "hydra.run.dir=run"]
    holotrain.done("fit", *words)
    path = Path("run/checkpoints/last.ckpt")
    sound = path.read_bytes()
    for name, value in (("wait_count", "x"), ("patience", -(10**12)), ("best_score", torch.ones(3)), ("stopped_epoch", None)):
        held = torch.load(path, weights_only=True)
        (state,) = (each for key, each in held["callbacks"].items() if key.startswith("EarlyStopping"))
        state[name] = value
        torch.save(held, path)
        assert f"EarlyStopping.{name} does not fit: it is " in holotrain.refused(
            "fit", "resume=true", "hydra.run.dir=run", *WORDS
        )
        path.write_bytes(sound)
    holotrain.done("fit", "resume=true", "hydra.run.dir=run", *WORDS)


def test_sound_ones_continue(holotrain, trained):
    holotrain.done("fit", f"ckpt_path={trained / 'sound.ckpt'}", *WORDS)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize("kind", [pipe, device, slow(loop)])
@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("run/checkpoints/last.ckpt", ["fit", "resume=true", "hydra.run.dir=run"]),
        slow("run/checkpoints/last.ckpt", ["fit", "ckpt_path=run/checkpoints/last.ckpt"]),
        ("run/checkpoints/last.ckpt", ["test", "ckpt_path=run"]),
        slow("sharded.ckpt/checkpoint.pt", ["test", "ckpt_path=sharded.ckpt"]),
        ("sharded.ckpt/tensors-1/1.safetensors", ["test", "ckpt_path=sharded.ckpt"]),
        ("export/model.safetensors", ["test", "ckpt_path=export"]),
        ("export/config.json", ["predict", "ckpt_path=export"]),
        ("weights.pt", ["fit", *SMALL, "model.pretrained=weights.pt"]),
        slow("folder/model.safetensors", ["fit", *SMALL, "model.pretrained=folder"]),
        slow("folder/pytorch_model.bin", ["fit", *SMALL, "model.pretrained=folder"]),
        slow("folder/1.safetensors", ["fit", *SMALL, "model.pretrained=folder"]),
    ],
)
def test_files_that_are_no_regular_ones(holotrain, trained, kind, file, words):
    shutil.copytree(trained, ".", dirs_exist_ok=True)
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    kind(path)
    if file.startswith("sharded.ckpt/tensors"):
        held = torch.load("sound.ckpt", weights_only=True)
        held["state_dict"] = {HEAD: torch.empty(10, 32, device="meta")}
        torch.save(held | {"tensors": "tensors-1"}, "sharded.ckpt/checkpoint.pt")
    if path.name == "1.safetensors":
        Path("folder").mkdir(exist_ok=True)
        Path("folder/model.safetensors.index.json").write_text('{"weight_map": {"x": "1.safetensors"}}')
    quickly_refused(holotrain, *words)


def test_an_export_of_other_numbers(holotrain, trained):
    shutil.copytree(trained / "export", "export")
    weights = load_file("export/model.safetensors")
    save_file(weights | {"head.weight": weights["head.weight"].bool()}, "export/model.safetensors")
    said = quickly_refused(holotrain, "test", "ckpt_path=export")
    assert "head.weight is (10, 32) torch.bool, not (10, 32)" in said


def test_in_python(given):
    import holotrain

    given(OTHER_NUMBERS["complex"], "test")
    with pytest.raises(holotrain.UserError, match=HEAD.removeprefix("model.")):
        holotrain.load("crafted.ckpt")
