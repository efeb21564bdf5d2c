"""Trainings that kill -9 ends at any moment are resumed, and end bit for bit as if nothing had been."""

import json
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed
import yaml
from covering import slow
from forked import Forked
from made_once import made_once
from small_run import fit_apart
from torch.utils._pytree import tree_leaves_with_path

from holotrain.models.checkpoint_files import read

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")

WORDS = [
    "model.dim=16", "model.depth=2", "model.heads=2", "model.dropout=0.2", "data.mixup_alpha=0.3", "data.batch_size=16",
    "trainer.max_epochs=2", "trainer.limit_train_batches=6", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1",
    "trainer.accumulate_grad_batches=2", "trainer.val_check_interval=3", "trainer.accelerator=cpu",
    "trainer.log_every_n_steps=1", "callbacks=ema", "callbacks.progress=null", "callbacks.checkpoint.every_n_train_steps=1",
    "callbacks.checkpoint.monitor=val/loss", "hydra.run.dir=run",
]  # fmt: skip
NO_LOGGER = [*WORDS, "logger=none"]
KINDS = {"one process": NO_LOGGER, "two processes": [*NO_LOGGER, "trainer=ddp", "trainer.devices=2", "trainer.timeout=60"]}
"""Six optimizer steps in two epochs, with four validations."""

CASES = [
    # kind, moment, how often it has come then, process
    slow("one process", "writing", 3, 0),
    slow("one process", "backward", 5, 0),
    slow("two processes", "writing", 3, 0),
    slow("two processes", "backward", 3, 1),
]


def ended(process: Forked, folder: Path) -> None:
    assert process.wait(200) == 0, (folder / "errors").read_text()


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The folder of the uninterrupted run of a kind."""
    return lambda kind: made_once(
        tmp_path_factory, f"whole {kind}", lambda folder: ended(fit_apart(folder, *KINDS[kind]), folder)
    )


def killed(moment: str, count: int, rank: int = 0) -> list[str]:
    options = {"_target_": "failures.killed.Killed", "moment": moment, "count": count, "rank": rank}
    return [f"++callbacks.kill.{name}={value}" for name, value in options.items()]


@pytest.mark.parametrize(("kind", "moment", "count", "rank"), CASES)
def test_a_killed_training_is_resumed_and_ends_as_the_uninterrupted_one(tmp_path, whole, kind, moment, count, rank):
    """Weights, their average, optimizer, schedule, random states and positions; and one best checkpoint is left."""
    kill = killed(moment, count, rank)
    assert fit_apart(tmp_path, *KINDS[kind], *kill).wait(200) in (-signal.SIGKILL, 1)
    run, reference = tmp_path / "run", whole(kind) / "run"
    assert (run / "killed").exists(), (tmp_path / "errors").read_text()
    for path in run.rglob("[!.]*"):  # whatever has its final name is whole
        if path.suffix == ".ckpt":
            assert read(path)["state_dict"]
        elif path.suffix in (".json", ".yaml"):
            assert yaml.safe_load(path.read_text())
    ended(fit_apart(tmp_path, "resume=true", "hydra.run.dir=run", kill[0].lstrip("+")), tmp_path)
    here, expected = states(run / "checkpoints" / "last.ckpt"), states(reference / "checkpoints" / "last.ckpt")
    assert here.keys() == expected.keys()
    for name, value in here.items():
        assert torch.equal(value, expected[name]) if isinstance(value, torch.Tensor) else value == expected[name], name
    bests = [[path.name for path in folder.rglob("best-*")] for folder in (run, reference)]
    assert bests[0] == bests[1] and json.loads((run / "summary.json").read_text())["status"] == "completed"


def states(checkpoint: Path) -> dict:
    """All but the configuration, what was measured and the paths of other checkpoints."""
    content = read(checkpoint)
    del content["holotrain"], content["measured"]
    content["callbacks"] = {name: state for name, state in content["callbacks"].items() if "Checkpoint" not in name}
    return dict(tree_leaves_with_path(content))


MEASURED = ("samples_per_second", "tokens_per_second", "step_seconds", "peak_memory_bytes", "seconds")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "words"),
    [
        (3, ["logger=csv", "trainer.limit_test_batches=4"]),
        (1, ["logger=none", "trainer.max_epochs=3", "trainer.check_val_every_n_epoch=2", "trainer.val_check_interval=1.0"]),
        (1, ["logger=none", "callbacks.checkpoint=null", "trainer.limit_val_batches=0"]),
        (1, ["logger=none", "trainer.max_steps=5", "callbacks.checkpoint.every_n_train_steps=null"]),
    ],
    ids=["the third batch", "a rare validation", "no validation", "a part of an epoch"],
)
def test_the_summary_is_whole_after_a_kill_during_the_test(tmp_path, count, words):
    folders, kill = [tmp_path / "whole", tmp_path / "killed"], killed("test", count)
    for folder in folders:
        folder.mkdir()
    ended(fit_apart(folders[0], *WORDS, *words), folders[0])
    assert fit_apart(folders[1], *WORDS, *words, *kill).wait(200) == -signal.SIGKILL
    assert not (folders[1] / "run" / "summary.json").exists()
    ended(fit_apart(folders[1], "resume=true", "hydra.run.dir=run", kill[0].lstrip("+")), folders[1])
    whole, resumed = (json.loads((folder / "run" / "summary.json").read_text()) for folder in folders)
    for name in MEASURED:
        assert (whole.pop(name) is None) == (resumed.pop(name) is None), name
    assert resumed | {"overrides": []} == whole | {"overrides": []}
