"""What TensorBoard shows of runs, and loggers of other programs, without their servers: a run for each job of a sweep."""

import logging
import re
from pathlib import Path

import pytest
from left_by_runs import only, summary
from shown_runs import Logged
from small_run import SMALL
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

BRIEF = [*SMALL, "trainer.max_epochs=1", "callbacks.progress=null"]


@pytest.mark.slow
def test_wandb_has_a_run_for_each_job(holotrain, monkeypatch):
    wandb = pytest.importorskip("wandb")
    ordinary, runs = wandb.init, []
    monkeypatch.setattr(wandb, "init", lambda **options: runs.append(ordinary(**options)) or runs[-1])
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    status, _, err = holotrain("fit", "-m", *BRIEF, "logger=wandb", "seed=1,2", "tags=[long,old]")
    assert status == 0 and "Traceback" not in err and wandb.run is None
    sweep = only(Path("runs/fit/sweeps"))
    assert len(runs) == 2
    for seed, (run, folder) in enumerate(zip(runs, (sweep / "0", sweep / "1"), strict=True), 1):
        (path,) = folder.glob("wandb/offline-run-*/*.wandb")
        assert path.name == f"run-{run.id}.wandb"
        assert all(name in path.read_bytes() for name in (b"best/val/accuracy", b"test/accuracy", b"train/loss"))
        assert (run.name, run.group, run.project) == (f"{sweep.name}/{folder.name}", sweep.name, "holotrain")
        assert {*run.tags} == {"long", "old"}
        assert run.config["seed"] == seed and run.config["model.dim"] == 16


@pytest.mark.slow
def test_mlflow_has_a_run_for_each_job(holotrain, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setattr(logging, "raiseExceptions", False)  # its handler keeps the standard error of the first test
    status, _, err = holotrain("fit", "-m", *BRIEF, "logger=mlflow", "seed=1,2", "name=base", "tags=[long]")
    assert status == 0 and "Traceback" not in err
    client = mlflow.MlflowClient("sqlite:///mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'holotrain'")
    found = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert found.keys() == {"base/0", "base/1"}
    for seed, run in enumerate((found["base/0"], found["base/1"]), 1):
        assert run.info.status == "FINISHED" and run.data.tags["long"] == "true"
        assert run.data.params["seed"] == str(seed) and run.data.params["model.dim"] == "16"
        assert {"val/accuracy", "best/val/accuracy", "test/accuracy", "train/loss"} <= run.data.metrics.keys()


def options(folder: Path):
    """Those of a run, by name."""
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    raw = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    return plugin_data_pb2.HParamsPluginData.FromString(raw).session_start_info.hparams


@pytest.mark.slow
def test_a_run_shows_what_it_learns_and_every_option(holotrain):
    words = [*SMALL, "trainer.deterministic=true", "name='a, base'", "tags=[long,old]"]
    out = holotrain.done("fit", *words, "hydra.run.dir=run")
    assert re.search(r"name +a, base *\n +tags +long, old *\n", out) and [path.name for path in Path().iterdir()] == ["run"]
    folder = Path("run")
    left, tags = summary(folder), EventAccumulator(str(folder / "tensorboard")).Reload().Tags()
    steps = {tag: [step for step, _ in Logged(folder).scalars(tag)] for tag in ("val/loss", "best/val/accuracy", "test/loss")}
    best = int(Path(left["checkpoint"]).stem.partition("step")[2])
    assert steps == {"val/loss": [3, 6], "best/val/accuracy": [3, 6], "test/loss": [best]}
    shown = options(folder)
    assert (
        {word.partition("=")[0] for word in words} | {"backward", "optimizer.lr"} <= {*shown} == {*Logged(folder).columns()[0]}
    )
    texts = {"model": "rev_vit_tiny", "name": "a, base", "tags": "long, old", "trainer.deterministic": "True"}
    assert shown["model.dim"].number_value == 16 and {key: shown[key].string_value for key in texts} == texts
    assert {*tags["images"]} == {"val/predictions", "val/confusion_matrix", "test/confusion_matrix"}
    assert {"optimization/gradient_norm", "optimization/update_ratio"} <= set(tags["scalars"])
    holotrain.done("fit", "resume=true", "trainer.max_epochs=3", "hydra.run.dir=run")
    left = summary(folder)
    assert (left["epochs"], left["name"], left["tags"]) == (3, "a, base", ["long", "old"])
