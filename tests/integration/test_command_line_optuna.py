"""Sweeps whose options Optuna chooses, from the results of the jobs before, and whose jobs run in other processes."""

import importlib.util
from importlib.metadata import version
from pathlib import Path

import pytest
from covering import slow
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


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sweep=optuna", "objective=test/acuracy"], "objective: 'test/acuracy' is not one of train/loss"),
        slow(["hydra/sweeper=optuna"], "hydra.sweeper.direction"),
    ],
)
def test_a_sweeper_that_searches_for_the_wrong_values_is_refused(holotrain, optuna, words, expected):
    status, _, err = holotrain("fit", "-m", *BRIEF, "hydra.sweeper.n_trials=1", *words)
    assert status == 2 and expected in err and "Traceback" not in err


@pytest.mark.slow
def test_a_search_goes_on_from_its_storage(holotrain, optuna):
    if not version("sqlalchemy").startswith("1."):
        pytest.skip("needs the SQLAlchemy of holotrain[optuna]")
    stored = ["hydra.sweeper.storage=sqlite:///trials.db", "hydra.sweeper.study_name=search", "hydra.sweeper.n_trials=1"]
    for trials in (1, 2):
        holotrain("fit", "-m", *BRIEF, "sweep=optuna", *stored)
        assert len(optuna.load_study(study_name="search", storage="sqlite:///trials.db").trials) == trials


def test_a_plugin_that_is_not_installed_is_named(holotrain, monkeypatch):
    from hydra.core.config_store import ConfigStore

    if importlib.util.find_spec("optuna") is not None:
        Plugins.instance()  # registers it
        monkeypatch.delitem(ConfigStore.instance().repo["hydra"]["sweeper"], "optuna.yaml")
    refused = holotrain.refused("fit", "-m", "sweep=optuna")
    assert "there is no 'optuna' among its options; a plugin of Hydra: pip install 'holotrain[optuna]'" in refused
