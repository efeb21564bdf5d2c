"""What becomes of a training in several processes when something happens to one of them, or its data are others."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch.distributed
from covering import long, slow
from data_files import write_letters
from forked import COMMAND_LINE, Forked
from gloo_pair import by_forks, free_port, statuses_of
from left_by_runs import assert_same_weights, summary, weights
from small_run import SMALL

from holotrain.parallel.processes import run_processes

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")

LAST = Path("checkpoints/last.ckpt")
WORDS = [
    "model=rev_vit_tiny", "model.dim=16", "model.depth=2", "model.heads=2", "model.dropout=0.1", "data.batch_size=8",
    "test=false", "trainer=ddp", "trainer.devices=2", "trainer.accelerator=cpu", "trainer.precision=64-true",
    "trainer.timeout=60", "trainer.limit_train_batches=3", "trainer.max_epochs=2", "trainer.limit_val_batches=1",
    "callbacks.progress=null", "logger=none", "hydra.run.dir=run",
]  # fmt: skip
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "-m", "holotrain"]


def incident(what: str) -> list[str]:
    return ["+callbacks.incident._target_=incidents.Incident", f"+callbacks.incident.what='{what}'"]


def done(*words: str) -> tuple[int, list[str], str]:
    """Exit status, lines of holotrain on stderr, and all of stderr."""
    process = Forked(COMMAND_LINE, "fit", *words, folder=Path.cwd(), errors="errors", out="out")
    status, err = process.wait(300), Path("errors").read_text()
    lines = [line for line in err.splitlines() if line.startswith("holotrain: ")]
    return status, [line for line in lines if not line.startswith("holotrain: SIGTERM: saving")], err


@pytest.mark.long
def test_torchrun_starts_all_again_and_they_end_as_if_nothing_had_been(holotrain):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", *TORCHRUN, "fit", *WORDS, *incident("SIGKILL")]
    restarted = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert restarted.returncode == 0, restarted.stderr
    assert "holotrain: torchrun started again, from run/checkpoints/last.ckpt" in restarted.stderr
    assert (summary(Path("run"))["steps"], summary(Path("run"))["processes"]) == (6, 2)
    assert by_forks(2, "fit", *WORDS, "hydra.run.dir=whole")[0] == 0
    assert_same_weights(Path("run") / LAST, Path("whole") / LAST)


@pytest.mark.parametrize(
    ("what", "words", "status", "line"),
    [
        slow(
            "SIGKILL", [], 2, r"rank 1 \(process \d+\) was killed by SIGKILL; resume with: .* fit resume=true hydra.run.dir=run"
        ),
        long("mistake", [], 2, "rank 1: give another disk$"),
        long("SIGSTOP", ["trainer.timeout=5"], 1, None),
    ],
)
def test_what_happens_to_one_process_ends_all(holotrain, what, words, status, line):
    children = set(psutil.Process().children(recursive=True))
    exit_status, lines, err = done(*WORDS, *words, *incident(what))
    assert exit_status == status, err
    if line:
        assert len(lines) == 1 and re.match(f"holotrain: {line}", lines[0]) and "Traceback" not in err, err
    else:
        assert "imed out" in err
    assert weights(Path("run") / LAST)
    begun = set(psutil.Process().children(recursive=True)) - children
    assert [child for child in begun if "holotrain.__main__" in " ".join(child.cmdline())] == []


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, long(signal.SIGINT)])
def test_a_signal_to_the_command_saves_and_ends_all(holotrain, signum):
    status, _, err = done(*WORDS, "data.num_workers=1", *incident(f"parent {signum.name}"))
    assert status == 128 + signum and "ended the training; its state is in run/checkpoints/last.ckpt" in err, err
    assert torch.load(Path("run") / LAST, weights_only=True)["global_step"] in (5, 6)


def test_processes_import_nothing_from_the_working_directory(holotrain):
    Path("json.py").write_text("open('imported', 'w')\nraise SystemExit(1)\n")
    before = dict(os.environ)
    assert run_processes(["--version"], 2) == 0
    assert not Path("imported").exists() and os.environ == before


TEXT = [
    *SMALL, "trainer=ddp", "trainer.timeout=60", "logger=none", "callbacks.progress=null", "test=false", "task=causal_lm",
    "model=rev_gpt_tiny", "data=text_files", "data.files=[data/*.txt]", "data.context=16", "data.cache_dir=cache",
]  # fmt: skip


def assert_refused(folder: Path, message: str) -> None:
    """Two processes, each in a folder of its own, with the folder of the run in common: both print one line, which is about
    rank 1."""
    env = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    errors = [folder / f"errors_{rank}" for rank in (0, 1)]

    def start(rank: int) -> Forked:
        own = env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        words = ("fit", *TEXT, f"hydra.run.dir={folder / 'run'}")
        return Forked(COMMAND_LINE, *words, folder=folder / str(rank), env=own, errors=errors[rank])

    assert statuses_of(2, start) == [2, 2], [path.read_text() for path in errors]
    for text in (path.read_text() for path in errors):
        assert text.startswith("holotrain: ") and text.count("\n") == 1 and "rank 1" in text and message in text, text
    assert not (folder / "run/checkpoints").exists()


@pytest.mark.slow
def test_processes_with_different_texts_are_refused(tmp_path):
    for rank in (0, 1):
        write_letters(tmp_path / f"{rank}/data", shift=rank)
    assert_refused(tmp_path, "data: rank 1 has other data than rank 0; content of train: ")


def test_a_mistake_in_the_data_of_one_process_ends_both(tmp_path):
    write_letters(tmp_path / "0/data")
    (tmp_path / "1").mkdir()
    assert_refused(tmp_path, "data.files: ")
