"""Trainings that a signal ends at any moment are resumed, and end bit for bit as if nothing had been."""

import json
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed
import yaml
from compared import assert_equal
from covering import long, slow
from failures.killed import APART
from forked import Forked
from made_once import made_once
from small_run import fit_apart
from torch import Tensor

from holotrain.models.checkpoint_files import read

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")

TINY = ["model.dim=16", "model.depth=2", "model.heads=2", "model.dropout=0.2", "trainer.max_epochs=2", "logger=none"]
TINY += ["trainer.accelerator=cpu", "callbacks.progress=null", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1"]
TINY += ["callbacks.checkpoint.every_n_train_steps=1", "callbacks.checkpoint.monitor=val/loss"]
IMAGES = [*TINY, "data.mixup_alpha=0.3", "callbacks=ema", "trainer.limit_train_batches=6"]
IMAGES += ["trainer.accumulate_grad_batches=2", "trainer.val_check_interval=3", "data.batch_size=16"]
TEXT = [*TINY, "task=causal_lm", "model=rev_gpt_tiny", "data=text_files", "data.files=lines.txt", "data.unit=line"]
TEXT += ["data.val_fraction=0.2", "data.test_fraction=0.1"]
TEXT += ["data.context=16", "data.cache_dir=cache", "trainer.limit_train_batches=5", "synthesis=associative"]
KINDS = {
    "images": [*IMAGES, "hydra.run.dir=run"],
    "text": [*TEXT, "hydra.run.dir=run"],
    "sweep": [*IMAGES, "-m", "seed=1,2", "hydra.sweep.dir=run"],
    "two processes": [*IMAGES, "trainer=ddp", "trainer.devices=2", "trainer.timeout=60", "hydra.run.dir=run"],
}
"""Two trainings are six optimizer steps in two epochs long, with four validations; that of text has ten steps and one."""

CASES = [
    # kind, moment, how often it has come then, signals; in a sweep, the job; in two processes, which one and whom it sends them
    # "time": after a share of the uninterrupted run's seconds, which is drawn with the number as seed
    ("images", "built", 1, "SIGKILL"),
    ("images", "writing", 3, "SIGTERM"),
    ("images", "written", 4, "SIGINT SIGINT"),
    ("images", "removing", 1, "SIGKILL"),
    ("images", "backward", 5, "SIGKILL"),
    ("images", "validation", 2, "SIGINT"),
    ("images", "epoch", 1, "SIGTERM SIGTERM"),
    ("images", "time", 1, "SIGKILL"),
    ("text", "writing", 2, "SIGKILL"),
    ("sweep", "writing", 3, "SIGKILL", "job=0"),
    ("sweep", "backward", 4, "SIGTERM", "job=0"),
    ("two processes", "validation", 2, "SIGINT SIGINT", "rank=1 to=parent"),
]
MORE = [
    ("images", "built", 1, "SIGINT SIGINT"),
    ("images", "setup", 1, "SIGINT"),
    ("images", "setup", 1, "SIGTERM"),
    ("images", "writing", 1, "SIGKILL"),
    ("images", "writing", 5, "SIGINT SIGINT SIGINT"),
    ("images", "written", 1, "SIGKILL"),
    ("images", "renamed", 6, "SIGKILL"),
    ("images", "removing", 1, "SIGINT SIGINT"),
    ("images", "batch", 1, "SIGTERM"),
    ("images", "backward", 1, "SIGINT"),
    ("images", "backward", 9, "SIGINT SIGINT"),
    ("images", "validation", 1, "SIGKILL"),
    ("images", "validation", 3, "SIGINT SIGINT"),
    ("images", "epoch", 2, "SIGINT SIGINT"),
    ("images", "test", 1, "SIGINT"),
    ("images", "time", 3, "SIGTERM"),
    ("images", "time", 4, "SIGINT"),
    ("images", "time", 5, "SIGINT SIGINT"),
    ("text", "backward", 7, "SIGTERM"),
    ("text", "validation", 1, "SIGINT SIGINT"),
    ("text", "time", 6, "SIGKILL"),
    ("text", "time", 7, "SIGTERM"),
    ("sweep", "built", 1, "SIGKILL", "job=0"),
    ("sweep", "writing", 1, "SIGINT SIGINT", "job=1"),
    ("sweep", "validation", 3, "SIGKILL", "job=1"),
    ("sweep", "time", 9, "SIGKILL"),
    ("sweep", "time", 10, "SIGINT SIGINT"),
    ("two processes", "writing", 3, "SIGKILL", "rank=0"),
    ("two processes", "backward", 3, "SIGKILL", "rank=1"),
    ("two processes", "backward", 4, "SIGTERM", "rank=1 to=parent"),
    ("two processes", "setup", 1, "SIGINT", "rank=1 to=parent"),
]
"""The rest, for the long tests."""


def ended(process: Forked, folder: Path) -> None:
    assert process.wait(200) == 0, (folder / "errors").read_text()


def with_text(folder: Path) -> None:
    draw = random.Random(1)
    lines = [" ".join(draw.choices("abcdefgh", k=20)) for _ in range(300)]
    (folder / "lines.txt").write_text("\n".join(lines))


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The folder of the uninterrupted run of a kind."""

    def made(folder: Path, kind: str) -> None:
        with_text(folder)
        Forked("", folder=folder).wait()  # the first one imports torch
        began = time.monotonic()
        ended(fit_apart(folder, *KINDS[kind]), folder)
        (folder / "seconds").write_text(str(time.monotonic() - began))

    return lambda kind: made_once(tmp_path_factory, f"whole {kind}", lambda folder: made(folder, kind))


def incident(moment: str, count: int, names: str, *given: str) -> list[str]:
    options = {"_target_": "failures.killed.Killed", "moment": moment, "count": count, "names": f"'{names}'"}
    options |= dict(word.split("=") for words in given for word in words.split())
    return [f"++callbacks.kill.{name}={value}" for name, value in options.items()]


@pytest.mark.parametrize(
    "case", [*map(slow, CASES), *map(long, MORE)], ids=lambda case: "-".join(map(str, case)).replace(" ", "-")
)
def test_what_a_signal_ends_is_resumed_and_ends_as_if_nothing_had_been(tmp_path, whole, case):
    kind, moment, count, names, *given = case
    reference = whole(kind)
    with_text(tmp_path)
    words, kill = KINDS[kind], []
    if moment == "time":
        process = fit_apart(tmp_path, *words)
        time.sleep(random.Random(count).random() * float((reference / "seconds").read_text()))
        with suppress(ProcessLookupError):  # it has ended
            for name in names.split():
                os.kill(process.pid, getattr(signal, name))
                time.sleep(APART)
    else:
        kill = incident(moment, count, names, *given)
        process = fit_apart(tmp_path, *words, *kill)
    status = process.wait(200)
    errors = (tmp_path / "errors").read_text()
    assert moment == "time" or [*(tmp_path / "run").rglob("killed")], "the moment has not come"
    if not (moment == "time" and status == 0):  # that may come too late
        check_ending(kind, names, status, errors)
    check_files(tmp_path / "run")

    resuming = [word.lstrip("+") for word in kill[:1]]
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    if kind != "sweep" and not last.exists():
        refused = fit_apart(tmp_path, "resume=true", "hydra.run.dir=run")
        assert refused.wait(100) == 2 and "to start it from the beginning" in (tmp_path / "errors").read_text()
        ended(fit_apart(tmp_path, *words, *kill), tmp_path)
    elif kind == "sweep":
        ended(fit_apart(tmp_path, *words, *kill, "resume=true"), tmp_path)
    else:
        ended(fit_apart(tmp_path, "resume=true", "hydra.run.dir=run", *resuming), tmp_path)
    for job in ("0", "1") if kind == "sweep" else (".",):
        assert_same_state(tmp_path / "run" / job, reference / "run" / job)


IN_TEST = {
    "one batch": (1, IMAGES),
    "the third batch": (3, [*(word.replace("logger=none", "logger=csv") for word in IMAGES), "trainer.limit_test_batches=4"]),
    "a rare validation": (1, [*IMAGES, "trainer.val_check_interval=1.0", "trainer.check_val_every_n_epoch=2"]),
    "three epochs, two validated": (1, [*IMAGES, "trainer.max_epochs=3", "trainer.check_val_every_n_epoch=2"]),
    "a part of an epoch": (1, [*IMAGES, "trainer.max_steps=5"]),
    "no validation": (1, [*IMAGES, "callbacks.checkpoint=null", "trainer.limit_val_batches=0"]),
    "saved after epochs": (1, [*IMAGES, "callbacks.checkpoint.every_n_train_steps=null"]),
    "text": (1, TEXT),
    "a sweep": (1, [*IMAGES, "-m", "seed=1,2", "hydra.sweep.dir=run"]),
    "two processes": (1, KINDS["two processes"]),
}
"""The batch of the test at which the process is killed, and the command line."""

MEASURED = ("samples_per_second", "tokens_per_second", "step_seconds", "peak_memory_bytes", "seconds")


@pytest.mark.parametrize("case", [name if name == "one batch" else slow(name) for name in IN_TEST])
def test_the_summary_is_whole_after_kill_9_during_the_test(tmp_path, case):
    count, words = IN_TEST[case]
    words = [*words, "trainer.log_every_n_steps=1", *(() if "-m" in words else ("hydra.run.dir=run",))]
    kill = incident("test", count, "SIGKILL", *(["job=1"] if "-m" in words else []))
    folders = [tmp_path / name for name in ("whole", "killed")]
    for folder in folders:
        folder.mkdir()
        with_text(folder)
    ended(fit_apart(folders[0], *words), folders[0])
    assert fit_apart(folders[1], *words, *kill).wait(200) == -signal.SIGKILL
    job = Path("run/1" if "-m" in words else "run")
    assert not (folders[1] / job / "summary.json").exists()
    again = [*words, *kill, "resume=true"] if "-m" in words else ["resume=true", "hydra.run.dir=run", kill[0].lstrip("+")]
    ended(fit_apart(folders[1], *again), folders[1])
    whole, resumed = (json.loads((folder / job / "summary.json").read_text()) for folder in folders)
    for name in MEASURED:
        assert (whole.pop(name) is None) == (resumed.pop(name) is None), name
    assert resumed | {"overrides": []} == whole | {"overrides": []}


def check_ending(kind: str, names: str, status: int, errors: str) -> None:
    """The exit status, and words that say what was kept."""
    first = getattr(signal, names.split()[0])
    killed = [2] if kind == "two processes" and first == signal.SIGKILL else []  # of another process than the first
    assert status in (128 + first, -first, *killed) and (names != "SIGTERM SIGTERM" or status == -first), errors
    words, *_ = errors.split("Exception ignored in")  # Python, of a Ctrl-C within its own clean-up
    assert "Traceback" not in words, errors
    if status == 128 + signal.SIGINT:  # the other processes are sent SIGTERM at the second
        assert "SIGINT ended" in words or (kind == "two processes" and "SIGTERM ended" in words), errors


def check_files(folder: Path) -> None:
    """Whatever has its final name is whole."""
    for path in folder.rglob("*"):
        if path.name.startswith(".") or not path.is_file():
            continue
        if path.suffix == ".ckpt":
            assert read(path)["state_dict"]
        elif path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".yaml":
            assert yaml.safe_load(path.read_text())


def assert_same_state(one: Path, other: Path) -> None:
    """Weights, their average, optimizer, schedule, random states and positions; and one best checkpoint is left."""
    here, there = (states(folder / "checkpoints" / "last.ckpt") for folder in (one, other))
    assert here.keys() == there.keys()
    for name, value in here.items():
        if isinstance(value, Tensor):
            assert_equal(value, there[name])
        else:
            assert value == there[name], name
    bests = [[path.name for path in (folder / "checkpoints").glob("best-*")] for folder in (one, other)]
    assert bests[0] == bests[1]
    assert json.loads((one / "summary.json").read_text())["status"] == "completed"


def states(checkpoint: Path) -> dict[str, object]:
    """All but the configuration, what was measured and the paths of other checkpoints."""
    held = read(checkpoint)
    del held["holotrain"], held["measured"]
    held["callbacks"] = {name: state for name, state in held["callbacks"].items() if "Checkpoint" not in name}
    return leaves(held)


def leaves(node: object, name: str = "") -> dict[str, object]:
    if isinstance(node, dict) and node:
        node = node.items()
    elif isinstance(node, list | tuple) and node:
        node = enumerate(node)
    else:
        return {name: node}
    return {key: leaf for inner, value in node for key, leaf in leaves(value, f"{name}/{inner}").items()}
