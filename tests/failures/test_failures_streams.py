"""Trainings whose standard streams are closed or lose their reader, limits of the system, and folders with odd names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked import Forked
from left_by_runs import only, summary
from small_run import SMALL

from holotrain.commands.streams import Unbreakable

QUICK = [*SMALL, "trainer.max_epochs=1", "callbacks.progress=null", "test=false"]
ROOT = Path(__file__).parents[2]

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full and limits of processes")


def started(folder: Path, redirected: str, *words: str) -> subprocess.CompletedProcess:
    """``python -m holotrain`` in a shell, with streams that the shell redirects."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
    script = f'set -o pipefail; "$PYTHON" -m holotrain "$@" {redirected}'
    return subprocess.run(["bash", "-c", script, "bash", *words], cwd=folder, env=environment, capture_output=True, text=True)


GOES_ON = "holotrain: not all was printed (Broken pipe); the files of the training are complete\n"


@linux
@pytest.mark.parametrize(
    ("redirected", "said"),
    [
        (">&-", ""),
        ("| (exec <&-)", GOES_ON),
    ],
)
def test_a_training_needs_no_reader(tmp_path, redirected, said):
    ended = started(tmp_path, redirected, "fit", *QUICK, "logger=none")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", said)
    assert summary(only(tmp_path / "runs/fit"))["status"] == "completed"


@linux
@pytest.mark.parametrize(
    ("words", "redirected", "status", "said"),
    [
        ("fit --help", "| (exec <&-)", 141, ""),
        ("fit --help", "> /dev/full", 2, "holotrain: cannot write to the standard output: No space left on device\n"),
    ],
)
def test_a_command_that_prints_ends_without_a_reader(tmp_path, words, redirected, status, said):
    ended = started(tmp_path, redirected, *words.split())
    assert (ended.returncode, ended.stderr) == (status, said)


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
name, size, moment = sys.argv[1:4]
def limit(self, *_, **named):
    resource.setrlimit(getattr(resource, name), (int(size), resource.getrlimit(getattr(resource, name))[1]))
setattr(ExactResume, moment, limit)
from holotrain.cli import main
sys.exit(main(["fit", *sys.argv[4:]]))
"""


@linux
@pytest.mark.parametrize(
    ("limit", "words", "said"),
    [
        (("RLIMIT_NOFILE", 6, "setup"), ["data.num_workers=2"], "Too many open files; raise the limit with ulimit -n"),
        (("RLIMIT_FSIZE", 9000, "setup"), ["logger=tensorboard"], "File too large; raise the limit with ulimit -f"),
    ],
)
def test_a_limit_of_the_system_is_named(tmp_path, limit, words, said):
    run = Forked(LIMITED, *limit, *QUICK, *words, "hydra.run.dir=run", folder=tmp_path, errors=tmp_path / "errors")
    status, (*warnings, line) = run.wait(), (tmp_path / "errors").read_text().splitlines()
    assert status == 2 and line.startswith("holotrain: ") and said in line, (warnings, line)
    assert all(each.startswith("warning: This DataLoader will create") for each in warnings), warnings  # on few cores
    assert (tmp_path / "run/config.yaml").is_file()


def test_a_training_in_a_folder_that_is_named_like_an_interpolation(holotrain):
    name = "${oc.env:HOME}"
    Path(name).mkdir()
    os.chdir(name)
    holotrain.done("fit", *QUICK, "logger=none")
    holotrain.done("fit", "resume=true", "trainer.max_epochs=2")
    assert summary(only(Path("runs/fit")))["epochs"] == 2
    holotrain.done("fit", "-m", *QUICK, "logger=none", f"hydra.sweep.dir=./{name}", "seed=1")
    assert summary(Path(name, "0"))["status"] == "completed"


def test_a_folder_given_with_an_interpolation_is_found_again(holotrain, monkeypatch):
    given = "${oc.env:RUN}/run"
    monkeypatch.setenv("RUN", "place")
    holotrain.done("fit", *QUICK, "logger=none", f"hydra.run.dir={given}")
    holotrain.done("fit", "resume=true", f"hydra.run.dir={given}", "trainer.max_epochs=2")
    assert summary(Path(given.replace("${oc.env:RUN}", "place")))["epochs"] == 2


def test_a_folder_whose_name_is_half_an_interpolation_is_refused(holotrain):
    Path("${").mkdir()
    os.chdir("${")
    assert "holds ${, but is no interpolation" in holotrain.refused("fit", *QUICK)


def test_a_folder_whose_name_is_not_utf8_is_refused_before_the_training(holotrain, tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system takes names in UTF-8 alone")
    os.chdir(folder)
    said = holotrain.refused("fit", *QUICK)
    assert r"caf\udce9" in said and "its name is not text in UTF-8" in said
    assert not any((folder / "runs/fit").iterdir())
