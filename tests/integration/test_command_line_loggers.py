"""At which steps scalars stand, and loggers of other programs, without their servers: a run for each job of a sweep."""

import logging
import signal
from pathlib import Path

import pytest
from left_by_runs import only, summary
from shown_runs import Logged
from small_run import SMALL

BRIEF = [*SMALL, "trainer.max_epochs=1", "callbacks.progress=null"]


def test_wandb_has_a_run_for_each_job(holotrain, monkeypatch):
    wandb = pytest.importorskip("wandb")
    ordinary, log, runs, logged = wandb.init, wandb.Run.log, [], {}

    def init(**options):
        runs.append(ordinary(**options))
        return runs[-1]

    def note(self, data, *rest, **options):
        logged.setdefault(self.id, set()).update(data)
        log(self, data, *rest, **options)

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb.Run, "log", note)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    status, _, err = holotrain("fit", "-m", *BRIEF, "logger=wandb", "seed=1,2", "tags=[long,old]")
    assert status == 0 and "Traceback" not in err and wandb.run is None
    sweep = only(Path("runs/fit/sweeps"))
    assert len(runs) == 2
    for seed, (run, folder) in enumerate(zip(runs, (sweep / "0", sweep / "1"), strict=True), 1):
        (path,) = folder.glob("wandb/offline-run-*/*.wandb")
        assert path.name == f"run-{run.id}.wandb"
        assert (run.name, run.group, run.project) == (f"{sweep.name}/{folder.name}", sweep.name, "holotrain")
        assert {*run.tags} == {"long", "old"}
        assert run.config["seed"] == seed and run.config["model.dim"] == 16
        assert {"val/accuracy", "best/val/accuracy", "test/accuracy", "train/loss"} <= logged[run.id]


@pytest.fixture
def mlflow(monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)  # its handler keeps the standard error of the first test
    return pytest.importorskip("mlflow")


def run_of(mlflow, folder):
    client = mlflow.MlflowClient(f"sqlite:///{(folder / 'mlflow/mlflow.db').resolve()}")
    (experiment,) = client.search_experiments(filter_string="name = 'holotrain'")
    (run,) = client.search_runs([experiment.experiment_id])
    return run


def test_mlflow_has_a_run_for_each_job_in_its_folder(holotrain, mlflow):
    status, _, err = holotrain("fit", "-m", *BRIEF, "logger=mlflow", "seed=1,2", "name=base", "tags=[long]")
    assert status == 0 and "Traceback" not in err
    sweep = only(Path("runs/fit/sweeps"))
    for seed, folder in enumerate((sweep / "0", sweep / "1"), 1):
        run = run_of(mlflow, folder)
        assert (run.info.run_name, run.info.status) == (f"base/{folder.name}", "FINISHED")
        assert run.data.tags["long"] == "true"
        assert run.data.params["seed"] == str(seed) and run.data.params["model.dim"] == "16"
        assert {"val/accuracy", "best/val/accuracy", "test/accuracy", "train/loss"} <= run.data.metrics.keys()
        assert Path(run.info.artifact_uri.removeprefix("file://")).is_relative_to(folder.resolve())
    assert not Path("mlruns").exists() and not Path("mlflow.db").exists()


def test_mlflow_records_a_training_that_was_stopped(holotrain, mlflow, monkeypatch):
    from holotrain.checkpoints.exact_resume import ExactResume

    monkeypatch.setattr(ExactResume, "on_train_batch_start", lambda *arguments: signal.raise_signal(signal.SIGTERM))
    status, _, err = holotrain("fit", *BRIEF, "logger=mlflow", "hydra.run.dir=stopped")
    assert status == 128 + signal.SIGTERM and "Traceback" not in err
    assert run_of(mlflow, Path("stopped")).info.status == "FAILED"


def steps(folder):
    """The steps at which each scalar stands."""
    logged = Logged(folder)
    return {tag: [step for step, _ in logged.scalars(tag)] for tag in logged.tags["scalars"]}


@pytest.mark.slow
def test_what_is_measured_stands_at_the_step_of_its_weights_and_no_curve_is_drawn_by_step_if_none_is_wanted(holotrain):
    out = holotrain.done("fit", *SMALL, "trainer.log_every_n_steps=0", "callbacks.checkpoint.monitor=val/loss")
    assert "train/loss" in out
    folder = only(Path("runs/fit"))
    found, left = steps(folder), summary(folder)
    assert {tag for tag in found if "/" in tag} == {"val/loss", "val/accuracy", "best/val/loss", "test/loss", "test/accuracy"}
    assert left["samples_per_second"] > 0 and left["step_seconds"] > 0 and left["peak_memory_bytes"] > 2**20
    assert found["val/loss"] == found["best/val/loss"] == [3, 6]
    assert {value for _, value in Logged(folder).scalars("epoch")} == {1, 2}
    best = int(Path(left["checkpoint"]).stem.partition("step")[2])
    assert best in (3, 6) and found["test/loss"] == found["test/accuracy"] == [best]
    for command, split in (("test", "test"), ("validate", "val")):
        assert holotrain(command, f"ckpt_path={folder}/checkpoints/last.ckpt")[0] == 0
        found = steps(only(Path("runs") / command))
        assert found == {f"{split}/loss": [6], f"{split}/accuracy": [6]}
    assert holotrain("test", f"ckpt_path={folder}/checkpoints/last.ckpt", "logger=none", "output_dir=mute")[0] == 0
    assert {path.name for path in only(Path("mute/test")).iterdir()} == {"summary.json", "log.txt"}
