"""A mistake in the values of a sweep is found before a job is started."""

import os
from pathlib import Path

import pytest

from holotrain.folders import run_folder


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("model.depth=1,two seed=1,2", "job 2 (model.depth=two seed=1): model.depth: 'two' is not a whole number; no job was"),
        ("data.batch_size=8,auto backward=reversible,auto", "job 3 (data.batch_size=auto backward=auto): data.batch_size=auto"),
        ("seed=1,2 optimizer.lrr=1", "job 0 (seed=1): optimizer.lrr: there is no 'lrr' in optimizer."),
    ],
)
def test_the_job_and_its_values_are_named_before_any_job_starts(holotrain, words, said):
    status, out, err = holotrain("fit", "-m", *words.split())
    assert (status, out) == (2, "") and err.startswith(f"holotrain: {said}") and err.count("\n") == 1
    assert not Path("runs").exists()


def test_a_sweep_without_a_job_is_not_resumed(tmp_path):
    """Such as one that was refused."""
    (tmp_path / "fit/sweeps/begun/0").mkdir(parents=True)
    (tmp_path / "fit/sweeps/refused").mkdir()
    (tmp_path / "fit/sweeps/refused/multirun.yaml").touch()
    os.utime(tmp_path / "fit/sweeps/begun/0", (0, 0))
    assert run_folder("fit/sweeps", str(tmp_path), resume=True) == str(tmp_path / "fit/sweeps/begun")
