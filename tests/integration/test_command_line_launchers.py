"""Sweeps whose jobs run in other processes than the command's own: what it shows, and with which status it ends."""

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


def table(root=Path()):
    return rows(only(root / "runs/fit/sweeps") / "sweep.csv")


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
