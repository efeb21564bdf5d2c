"""Trainings whose standard streams are closed or lose their reader, limits of the system, and folders with odd names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked import Forked
from left_by_runs import only, summary
from small_run import SMALL

from holotrain.cli import Unbreakable

QUICK = [*SMALL, "trainer.max_epochs=1", "callbacks.progress=null", "test=false"]
ROOT = Path(__file__).parents[2]

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full and limits of processes")


def started(folder: Path, redirected: str, *words: str) -> subprocess.CompletedProcess:
    """``python -m holotrain`` in a shell, with streams that the shell redirects."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
    script = f'set -o pipefail; "$PYTHON" -m holotrain "$@" {redirected}'
    return subprocess.run(["bash", "-c", script, "bash", *words], cwd=folder, env=environment, capture_output=True, text=True)


@linux
def test_a_training_needs_no_reader(tmp_path):
    ended = started(tmp_path, "| (exec <&-)", "fit", *QUICK, "logger=none")
    expected = "holotrain: not all was printed (Broken pipe); the files of the training are complete\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", expected)
    assert summary(only(tmp_path / "runs/fit"))["status"] == "completed"


@linux
def test_a_command_that_prints_says_that_it_cannot(tmp_path):
    ended = started(tmp_path, "> /dev/full", "fit", "--help")
    expected = "holotrain: cannot write to the standard output: No space left on device\n"
    assert (ended.returncode, ended.stderr) == (2, expected)


def test_what_follows_the_first_error_is_dropped():
    read, written = os.pipe()
    stream = Unbreakable(written, "w")
    assert stream.write(b"seen") == 4 and stream.error is None and os.read(read, 9) == b"seen"
    os.close(read)
    assert stream.write(b"lost") == 4 and isinstance(stream.error, BrokenPipeError) and stream.write(memoryview(b"too")) == 3
    stream.close()


LIMITED = """
import resource, sys
from holotrain.checkpoints.exact_resume import ExactResume
def limit(self, *_, **named):
    resource.setrlimit(resource.RLIMIT_NOFILE, (6, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
ExactResume.setup = limit
from holotrain.cli import main
sys.exit(main(["fit", *sys.argv[1:]]))
"""


@linux
def test_a_limit_of_the_system_is_named(tmp_path):
    words = [*QUICK, "data.num_workers=2", "hydra.run.dir=run"]
    status = Forked(LIMITED, *words, folder=tmp_path, errors=tmp_path / "errors").wait()
    *_, line = (tmp_path / "errors").read_text().splitlines()
    assert status == 2 and line.startswith("holotrain: ") and "Too many open files; raise the limit with ulimit -n" in line


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
