"""Trainings beside each other, and a clock that is set back."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from left_by_runs import assert_same_weights, summary
from small_run import fit_and_kill, fit_apart

from holotrain.folders import run_folder

TINY = ["model.dim=16", "model.depth=2", "model.heads=2", "model.dropout=0.2", "trainer.accelerator=cpu", "logger=none"]
TINY += ["callbacks.progress=null", "trainer.max_epochs=2", "trainer.limit_train_batches=4", "trainer.limit_val_batches=1"]
TEXT = ["task=causal_lm", "model=rev_gpt_tiny", "data=text_files", "data.files=lines.txt", "data.unit=line"]
TEXT += ["data.val_fraction=0.2", "data.test_fraction=0.1", "data.context=16", "data.cache_dir=cache"]
TEXT += ["data.tokenizer=bpe", "data.vocab_size=270"]


def test_runs_that_start_in_the_same_second_have_folders_of_their_own(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        folders = {*pool.map(lambda _: run_folder("fit", str(tmp_path), False), range(100))}
    assert len(folders) == 100


@pytest.mark.slow
def test_three_that_start_at_once_share_a_cache(tmp_path):
    (tmp_path / "lines.txt").write_text("\n".join(f"line {number} of some text" for number in range(2000)))
    words = [*TINY, *TEXT]
    processes = [fit_apart(tmp_path, *words, f"hydra.run.dir=run{number}", errors=f"errors{number}") for number in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0], [path.read_text() for path in tmp_path.glob("errors*")]
    for other in (1, 2):
        assert_same_weights(tmp_path / "run0/checkpoints/last.ckpt", tmp_path / f"run{other}/checkpoints/last.ckpt")


@pytest.mark.slow
def test_two_that_are_given_a_folder_do_not_meet_in_it(tmp_path):
    words = [*TINY, "hydra.run.dir=run"]
    first = fit_apart(tmp_path, *words, "trainer.max_epochs=40", errors="of_the_first")
    while first.poll() is None and not (tmp_path / "run/checkpoints/last.ckpt").exists():
        time.sleep(0.01)
    assert fit_apart(tmp_path, *words).wait() == 2
    said = "holotrain: run: another run is writing into it; wait until it ends, or name another folder\n"
    assert (tmp_path / "errors").read_text() == said and first.wait() == 0
    assert summary(tmp_path / "run")["steps"] == 160


@pytest.mark.slow
def test_a_run_whose_files_are_of_the_future_is_continued(holotrain, tmp_path):
    words = [*TINY, "trainer.limit_train_batches=6"]
    assert holotrain("fit", *words, "hydra.run.dir=whole")[::2] == (0, "")
    fit_and_kill(tmp_path, *words, "hydra.run.dir=run")
    for path in Path("run").rglob("*"):
        os.utime(path, (2**31, 2**31))
    assert holotrain("fit", "resume=true", "hydra.run.dir=run")[::2] == (0, "")
    assert_same_weights(Path("run/checkpoints/last.ckpt"), Path("whole/checkpoints/last.ckpt"))
