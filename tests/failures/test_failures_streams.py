"""A command whose reader has left, and trainings in folders with odd names."""

import os
import subprocess
import sys
from pathlib import Path

from left_by_runs import only, summary
from small_run import SMALL

QUICK = [*SMALL, "trainer.max_epochs=1", "callbacks.progress=null", "test=false"]
ROOT = Path(__file__).parents[2]


def test_a_command_that_prints_ends_quietly_when_its_reader_has_left(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
    script = 'set -o pipefail; "$PYTHON" -m holotrain fit --help | (exec <&-)'
    ended = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_a_training_in_a_folder_that_is_named_like_an_interpolation(holotrain):
    name = "${oc.env:HOME}"
    Path(name).mkdir()
    os.chdir(name)
    holotrain.done("fit", *QUICK, "logger=none")
    holotrain.done("fit", "resume=true", "trainer.max_epochs=2")
    assert summary(only(Path("runs/fit")))["epochs"] == 2
    holotrain.done("fit", "-m", *QUICK, "logger=none", f"hydra.sweep.dir=./{name}", "seed=1")
    assert summary(Path(name, "0"))["status"] == "completed"


def test_a_folder_whose_name_is_half_an_interpolation_is_refused(holotrain):
    Path("${").mkdir()
    os.chdir("${")
    assert "holds ${, but is no interpolation" in holotrain.refused("fit", *QUICK)
