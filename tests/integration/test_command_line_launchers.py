"""Sweeps whose jobs run in other processes than the command's own: what it shows, and with which status it ends."""

import copy
import csv
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.plugins import Plugins
from left_by_runs import summary
from small_run import SMALL

BRIEF = [*SMALL, "trainer.max_epochs=1", "test=false", "logger=none"]


@pytest.fixture
def elsewhere(monkeypatch):
    """Jobs run on a copy of what the command keeps in memory, as in another process. Returns what changes their results."""
    launcher = Plugins.instance().class_name_to_class["hydra._internal.core_plugins.basic_launcher.BasicLauncher"]
    launch, change = launcher.launch, []

    def launch_elsewhere(self, job_overrides, initial_job_idx):
        self.task_function = copy.deepcopy(self.task_function)
        returned = launch(self, job_overrides, initial_job_idx)
        return change[0](returned) if change else returned

    monkeypatch.setattr(launcher, "launch", launch_elsewhere)
    return change


def rows_of_sweep():
    (sweep,) = Path("runs/fit/sweeps").iterdir()
    return [(row["job"], row["status"]) for row in csv.DictReader((sweep / "sweep.csv").open())]


def test_a_job_that_fails_elsewhere_is_the_status_of_the_command(holotrain, elsewhere):
    status, out, err = holotrain("fit", "-m", *BRIEF, "model.heads=3,2")
    assert status == 2 and "16 is not a multiple of 3" in err and "sweep of 2 jobs" in out
    assert rows_of_sweep() == [("0", "failed"), ("1", "completed")]


def test_a_defect_elsewhere_is_the_status_of_the_command(holotrain, elsewhere, monkeypatch):
    from holotrain.commands import fit

    monkeypatch.setattr(fit, "run", lambda config, run: 1 / 0)
    status, _, err = holotrain("fit", "-m", *BRIEF, "seed=1,2")
    assert status == 1 and err.count("ZeroDivisionError") == 2
    assert rows_of_sweep() == [("0", "failed"), ("1", "failed")]


@pytest.mark.parametrize("returned", [lambda jobs: jobs[:1], lambda jobs: []], ids=["one of two", "none"])
def test_a_job_of_which_nothing_is_heard_has_failed(holotrain, elsewhere, monkeypatch, returned):
    from holotrain.commands import fit

    monkeypatch.setattr(fit, "run", lambda config, run: 0)
    elsewhere.append(returned)
    status, _, err = holotrain("fit", "-m", *BRIEF, "hydra.sweeper.max_batch_size=2", "seed=1,2")
    assert status == 1 and "a job of the sweep ended without a result" in err and "seed=2" in err


def test_a_signal_elsewhere_ends_the_sweep_with_its_status(holotrain, elsewhere, monkeypatch):
    from holotrain.callbacks import ExactResume

    def terminate(self, trainer, module, batch, index):
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(ExactResume, "on_train_batch_start", terminate)
    status, _, err = holotrain("fit", "-m", *BRIEF, "seed=1,2")
    assert status == 128 + signal.SIGTERM and "SIGTERM ended the training" in err


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("hydra_plugins.hydra_joblib_launcher") is None, reason="needs joblib's launcher")
def test_jobs_of_joblib(tmp_path):
    """In processes of joblib's: one that fails, and one that completes."""
    command = [sys.executable, "-m", "holotrain", "fit", "-m", *BRIEF, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    run = subprocess.run([*command, "model.heads=3,2"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 2 and "16 is not a multiple of 3" in run.stderr, run.stderr
    (sweep,) = (tmp_path / "runs/fit/sweeps").iterdir()
    assert [row["status"] for row in csv.DictReader((sweep / "sweep.csv").open())] == ["failed", "completed"]
    assert summary(sweep / "1")["status"] == "completed"
