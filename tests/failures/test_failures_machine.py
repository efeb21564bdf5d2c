"""What a machine or a person does to a training is said in one line, and what was written stays."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from left_by_runs import weights
from small_run import SMALL, fit_apart

from holotrain.commands.failures import machine_failures
from holotrain.commands.run_folder import Run
from holotrain.errors import MachineFailure

WORDS = [*SMALL, "callbacks.progress=null", "callbacks.checkpoint.every_n_train_steps=1", "hydra.run.dir=run"]
RESUMED = r"; resume with: python -m holotrain fit resume=true hydra\.run\.dir=run .*"
LAST = Path("run/checkpoints/last.ckpt")


def happening(what: str) -> list[str]:
    return ["+callbacks.happening._target_=failures.happening.Happening", f"+callbacks.happening.what={what}"]


def said_at_the_end(folder: Path, *words: str) -> str:
    """The one line of a training that ends with status 2."""
    status = fit_apart(folder, *WORDS, *words).wait(200)
    errors = (folder / "errors").read_text()
    assert status == 2 and errors.count("\n") == 1, (status, errors)
    return errors.removeprefix("holotrain: ").rstrip()


def test_a_data_worker_that_is_killed(tmp_path):
    words = ["data.num_workers=2", "logger=none", "trainer.max_epochs=40", *happening("killed")]
    reason = r"\((killed by signal: Killed|exited unexpectedly)\), probably for lack of memory; fewer .*"
    assert re.fullmatch(rf"data worker \d+ died {reason}{RESUMED}", said_at_the_end(tmp_path, *words))
    assert weights(tmp_path / LAST) and not (tmp_path / "run/summary.json").exists()


class Handing:
    """As torch's iterator, where one of two workers dies."""

    _workers = (SimpleNamespace(pid=7, exitcode=0), SimpleNamespace(pid=8, exitcode=-9))

    def _try_get_data(self) -> None:
        raise ConnectionResetError(104, "Connection reset by peer")


def test_a_data_worker_that_is_killed_while_it_hands_a_batch_over(tmp_path):
    run = Run("fit", tmp_path, [], {})
    with pytest.raises(MachineFailure, match="^data worker 8 died "), machine_failures(run):
        Handing()._try_get_data()
    with pytest.raises(ConnectionResetError), machine_failures(run):
        raise ConnectionResetError(104, "Connection reset by peer")


def test_a_folder_that_is_renamed(tmp_path):
    said = said_at_the_end(tmp_path, *happening("renamed"))
    assert re.fullmatch("run: the folder was renamed or removed during the training, which ends; if .*", said)
    assert not (tmp_path / "run").exists() and (tmp_path / "renamed/checkpoints/last.ckpt").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
def test_a_disk_that_is_full(tmp_path):
    said = said_at_the_end(tmp_path, *happening("full"))
    assert re.match(r"\S*run\S*( cannot be written)?: .*No space left on device", said), said
    assert weights(tmp_path / LAST)
