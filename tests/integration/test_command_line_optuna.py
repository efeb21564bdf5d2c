"""Sweeps whose options Optuna chooses, from the results of the jobs before, and whose jobs run in other processes."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from covering import long, slow
from hydra.core.plugins import Plugins
from left_by_runs import only, rows, summary
from small_run import SMALL

BRIEF = [*SMALL, "trainer.max_epochs=1", "test=false", "logger=none", "callbacks.progress=null"]


@pytest.fixture
def optuna():
    optuna = pytest.importorskip("optuna", reason="needs hydra-optuna-sweeper")
    optuna.logging.disable_default_handler()  # it keeps the standard error of the first test
    return optuna


@pytest.fixture
def told(optuna, monkeypatch):
    """The state and value of each trial, as the study was told."""
    found = []
    ordinary = optuna.Study.tell

    def tell(self, trial, values=None, state=optuna.trial.TrialState.COMPLETE, **rest):
        ordinary(self, trial, values=values, state=state, **rest)
        found.append((state.name, values and values[0]))

    monkeypatch.setattr(optuna.Study, "tell", tell)
    return found


def table():
    sweep = only(Path("runs/fit/sweeps"))
    return sweep, rows(sweep / "sweep.csv")


@pytest.mark.slow
def test_a_job_tells_the_best_value_and_one_that_fails_ends_nothing(holotrain, told):
    """With the plugin's own settings, under which an exception would end the sweep."""
    words = ["hydra/sweeper=optuna", "hydra.sweeper.direction=maximize", "hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=1"]
    words += ["hydra.sweeper.sampler.seed=1", "model.heads=2,3", "optimizer.lr=0.05"]
    status, out, err = holotrain("fit", "-m", *(word for word in BRIEF if "heads" not in word), *words)
    sweep, jobs = table()
    failed = [row["model.heads"] == "3" for row in jobs]
    assert status == 2 and len(jobs) == 4 and 0 < sum(failed) < 4 and "Traceback" not in err
    assert [row["status"] for row in jobs] == ["failed" if there else "completed" for there in failed]
    assert [state for state, _ in told] == ["FAIL" if there else "COMPLETE" for there in failed]
    for (_, value), row, there in zip(told, jobs, failed, strict=True):
        assert ("not a multiple" in row["error"]) == there
        if not there:
            left = summary(sweep / row["job"])
            assert value == left["metrics"]["best/val/accuracy"] >= left["metrics"]["val/accuracy"]
            assert (left["monitor"], left["mode"]) == ("val/accuracy", "max")


@pytest.mark.long
def test_the_sweep_optimises_another_metric_than_the_checkpoint(holotrain, told):
    words = ["objective=test/loss", "callbacks.checkpoint.monitor=val/accuracy", "hydra.sweeper.n_trials=2", "test=true"]
    status, out, _ = holotrain("fit", "-m", "sweep=optuna", *BRIEF, *words)
    sweep, jobs = table()
    values = [float(row["test/loss"]) for row in jobs]
    assert status == 0 and [value for _, value in told] == values
    assert f"best job: {values.index(min(values))}, test/loss" in out
    assert yaml.safe_load((sweep / "optimization_results.yaml").read_text())["best_value"] == min(values)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sweep=optuna", "objective=test/acuracy"], "objective: 'test/acuracy' is not one of train/loss"),
        slow(["sweep=optuna", "objective=test/loss", "test=false"], "objective: 'test/loss' is not one of"),
        slow(["hydra/sweeper=optuna"], "hydra.sweeper.direction"),
        slow(["sweep=optuna", "objective=null", "trainer.limit_val_batches=0"], "trainer.limit_val_batches"),
    ],
)
def test_a_sweeper_that_searches_for_the_wrong_values_is_refused(holotrain, optuna, words, expected):
    status, _, err = holotrain("fit", "-m", *BRIEF, "hydra.sweeper.n_trials=1", *words)
    assert status == 2 and expected in err and "Traceback" not in err


def test_a_plugin_that_is_not_installed_is_named(holotrain, monkeypatch):
    from hydra.core.config_store import ConfigStore

    if importlib.util.find_spec("optuna") is not None:
        Plugins.instance()  # registers it
        monkeypatch.delitem(ConfigStore.instance().repo["hydra"]["sweeper"], "optuna.yaml")
    expected = "holotrain: hydra/sweeper=optuna: the package is not installed; pip install 'holotrain[optuna]'\n"
    assert holotrain.refused("fit", "-m", "sweep=optuna") == expected


class Killed(BaseException):
    """Ends a process, as far as a launcher can see."""


@pytest.mark.slow
def test_a_job_whose_process_dies_has_failed(holotrain, monkeypatch):
    """The launcher raises then, as joblib and submitit do."""
    from holotrain.commands import fit

    basic = Plugins.instance().class_name_to_class["hydra._internal.core_plugins.basic_launcher.BasicLauncher"]
    launch = basic.launch

    def launch_all(self, job_overrides, initial_job_idx):
        try:
            return launch(self, job_overrides, initial_job_idx)
        except Killed:
            raise RuntimeError("a worker was killed\nmore") from None

    def run(config, run):
        if config.seed == 2:
            raise Killed
        return 2

    monkeypatch.setattr(basic, "launch", launch_all)
    monkeypatch.setattr(fit, "run", run)
    status, _, err = holotrain("fit", "-m", *BRIEF, "seed=1,2,3")
    assert (status, err) == (1, "holotrain: the sweep ended: a worker was killed\n")
    assert [(row["status"], row["error"]) for row in table()[1]] == [
        ("failed", "exit status 2"),
        ("failed", "its process died"),
    ]


@pytest.mark.parametrize("launcher", [long("joblib"), long("submitit_local")])
def test_the_table_does_not_depend_on_the_launcher(holotrain, tmp_path, launcher):
    """Four jobs: two that fail, two that complete."""
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.removesuffix('_local')}_launcher")
    words = [f"hydra/launcher={launcher}", *(["hydra.launcher.n_jobs=2"] if launcher == "joblib" else [])]
    (tmp_path / "elsewhere").mkdir()
    command = ["fit", "-m", *BRIEF, "model.heads=3,2", "seed=1,2"]
    elsewhere = subprocess.run(
        [sys.executable, "-m", "holotrain", *command, *words], cwd="elsewhere", capture_output=True, text=True, timeout=900
    )
    status, out, _ = holotrain(*command)
    assert elsewhere.returncode == status == 2, elsewhere.stderr
    theirs, ours = rows(only(Path("elsewhere/runs/fit/sweeps")) / "sweep.csv"), table()[1]
    measured = ("samples_per_second", "step_seconds", "peak_memory_bytes", "seconds")
    assert [{key: row[key] for key in row if key not in measured} for row in theirs] == [
        {key: row[key] for key in row if key not in measured} for row in ours
    ]
    assert [row["status"] for row in ours] == ["failed", "failed", "completed", "completed"]
    assert "16 is not a multiple of 3" in theirs[0]["error"] and theirs[2]["best/val/accuracy"] != ""
    shown = [[line for line in text.splitlines() if re.match(r"  (job|\d) ", line)] for text in (elsewhere.stdout, out)]
    assert [line.split()[:6] for line in shown[0]] == [line.split()[:6] for line in shown[1]] and len(shown[0]) == 5
