"""Sweeps whose jobs run in other processes than the command's own: what it shows, and with which status it ends."""

import copy
import re
import subprocess
import sys
from pathlib import Path

import pytest
from covering import long, slow
from hydra.core.plugins import Plugins
from left_by_runs import only, rows
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


def table(root=Path()):
    return rows(only(root / "runs/fit/sweeps") / "sweep.csv")


def test_a_job_that_fails_elsewhere_is_the_status_of_the_command(holotrain, elsewhere):
    status, out, err = holotrain("fit", "-m", *BRIEF, "model.heads=3,2")
    assert status == 2 and "16 is not a multiple of 3" in err and "sweep of 2 jobs" in out
    assert "best/val/accuracy" in out.partition("sweep of 2 jobs")[2]  # also where one job alone has it
    first, second = table()
    assert [(row["job"], row["status"]) for row in (first, second)] == [("0", "failed"), ("1", "completed")]
    assert "16 is not a multiple of 3" in first["error"] and second["error"] == "" and first["error"] in out


@pytest.mark.slow
def test_a_defect_counts_for_more_than_a_mistake(holotrain, monkeypatch):
    from holotrain.commands import fit
    from holotrain.errors import UserError

    def fail(config, run):
        raise UserError("a mistake") if config.seed == 1 else RuntimeError("a defect")

    monkeypatch.setattr(fit, "run", fail)
    assert holotrain("fit", "-m", *BRIEF, "seed=1,2,1")[0] == 1
    assert [row["error"] for row in table()] == ["a mistake", "RuntimeError: a defect", "a mistake"]


class Killed(BaseException):
    """Ends a process, as far as a launcher can see."""


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
    assert [(row["status"], row["error"]) for row in table()] == [("failed", "exit status 2"), ("failed", "its process died")]


@pytest.mark.parametrize("launcher", [slow("joblib"), long("submitit_local")])
def test_the_table_does_not_depend_on_the_launcher(holotrain, tmp_path, launcher):
    """Four jobs: two that fail, two that complete."""
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.removesuffix('_local')}_launcher")
    words = [f"hydra/launcher={launcher}", *(["hydra.launcher.n_jobs=2"] if launcher == "joblib" else [])]
    (tmp_path / "elsewhere").mkdir()
    jobs = ["model.heads=3,2", "seed=1,2"]
    command = [sys.executable, "-m", "holotrain", "fit", "-m", *[*BRIEF, *words, *jobs]]
    elsewhere = subprocess.run(command, cwd=tmp_path / "elsewhere", capture_output=True, text=True, timeout=300)
    status, out, _ = holotrain("fit", "-m", *BRIEF, *jobs)
    assert elsewhere.returncode == status == 2, elsewhere.stderr
    theirs, ours = table(tmp_path / "elsewhere"), table()
    measured = ("samples_per_second", "step_seconds", "peak_memory_bytes", "seconds")
    assert [{key: row[key] for key in row if key not in measured} for row in theirs] == [
        {key: row[key] for key in row if key not in measured} for row in ours
    ]
    assert [row["status"] for row in ours] == ["failed", "failed", "completed", "completed"]
    assert "16 is not a multiple of 3" in theirs[0]["error"] and theirs[2]["best/val/accuracy"] != ""
    assert list(theirs[0]) == list(ours[0])
    shown = [[line for line in text.splitlines() if re.match(r"  (job|\d) ", line)] for text in (elsewhere.stdout, out)]
    assert [line.split()[:6] for line in shown[0]] == [line.split()[:6] for line in shown[1]] and len(shown[0]) == 5
