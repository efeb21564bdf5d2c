"""Wrong command lines are answered in a line or two: a smoke test, for refusals are tested where they are raised.

Beside them odd names of folders, and a reader that has left.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import SMALL

TABLES = {
    "": [
        # commands and flags
        ("fitt", "'fit'"),
        ("fit optimizer.lr = 1", "optimizer.lr"),
        ("fit --lr 3", "--lr"),
        # names, lists, and text in one line
        ("fit lr=1", "optimizer.lr"),
        ("fit model=rev_vit_tinny", "rev_vit_tiny"),
        ("fit data=digits,cifar10", "add -m"),
        ("fit callbacks.memory=3", "callbacks.memory"),
        ("fit tags=long", "tags"),
        # several values
        ("fit sweep=optuna", "add -m"),
        ("fit -m 'seed=range(0)'", "no job"),
        # types and ranges
        ("plan memory=lots", "memory: 'lots' is not an amount of memory; write a number and its unit"),
        ("fit model.dim=4611686018427387904", "do not fit into memory"),
        ("fit task=causal_lm trainer.max_steps=-1", "trainer.max_steps"),
        ("fit seed='${nope}'", "nope"),
        # files and folders
        ("fit resume=true hydra.run.dir=empty", "empty has no checkpoint"),
        ("fit resume=true", "no run with a checkpoint in runs/fit"),
        ("fit ckpt_path=nowhere.ckpt", "no file nowhere.ckpt"),
        ("fit data.val_fraction=0", "data: no image is left for val; raise data.val_fraction, or set"),
        ("fit output_dir=/proc/nothing", "cannot write to /proc/nothing"),
        ("fit output_dir=a\udcffb", "is not text in UTF-8"),
        ("predict ckpt_path=run texts=text.ckpt", "predict: the checkpoint learned from Digits, not from texts"),
        ("init full", "full exists already"),
    ],
    "fit trainer.accelerator=cpu": [
        ("task=error_diffusion task.clamp_signs=true", "clamp_signs"),
        ("trainer.devices=2", "trainer=default uses one process"),
        ("trainer=ddp trainer.num_nodes=2", "start it with torchrun"),
        ("trainer=pipeline synthesis=bind", "synthesis"),
        ("trainer=tp callbacks=ema", "average"),
    ],
}
"""What is typed after ``holotrain``, by what it begins with, and what the answer must say."""

WRONG = [(f"{begin} {line}".strip(), message) for begin, table in TABLES.items() for line, message in table]


@pytest.fixture
def typed(holotrain, image_run):
    """Types a line in a folder with a finished training ``run``, a text ``text.ckpt``, and folders ``empty`` and ``full``."""
    Path("run").symlink_to(image_run)
    Path("text.ckpt").write_text("no checkpoint")
    Path("empty").mkdir()
    Path("full").mkdir()
    Path("full/mine").write_text("a file")
    return lambda line: holotrain(*shlex.split(line))


def files() -> list[Path]:
    """But for caches of data."""
    return sorted(path for path in Path().rglob("*") if path.is_file() and path.parts[0] not in ("data", "runs"))


@pytest.mark.parametrize(("line", "message"), WRONG, ids=[line[-60:] for line, _ in WRONG])
def test_a_wrong_command_line_is_answered_in_a_line_or_two(typed, line, message):
    before = files()
    status, out, err = typed(line)
    assert status == 2 and (out == "" or "auto" in line)  # a batch size or schedules are planned first
    assert message in err and err.startswith("holotrain: ")
    assert err.count("\n") <= 2 and "Traceback" not in err
    assert not list(Path().glob("runs/fit/20*")) and files() == before  # a run that did not begin leaves no folder


QUICK = [*SMALL, "trainer.max_epochs=1", "callbacks.progress=null", "test=false"]
ROOT = Path(__file__).parents[2]


def test_what_is_found_when_the_training_begins_is_one_line_too(holotrain):
    assert holotrain.refused("fit", *QUICK, "optimizer.lr=nan") == "holotrain: optimizer: Invalid learning rate: nan\n"
    said = holotrain.refused("fit", *QUICK, "synthesis=shared", "synthesis.cover=[nothing]", "trainer.gradient_clip_val=null")
    assert said.startswith("holotrain: synthesis.cover: 'nothing' matches no parameter; names look like ")


def test_a_command_that_prints_ends_quietly_when_its_reader_has_left(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
    script = 'set -o pipefail; "$PYTHON" -m holotrain fit --help | (exec <&-)'
    ended = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (141, "")
