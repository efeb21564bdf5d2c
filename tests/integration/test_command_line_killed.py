"""kill -9 and Ctrl-C: what is resumed ends with the weights and the summary of an uninterrupted run, bit for bit."""

import multiprocessing
import os
import random
import signal
from pathlib import Path

import pytest
import torch
from covering import long
from left_by_runs import assert_same_weights, summary
from small_run import SMALL, fit_and_kill

LAST = Path("checkpoints/last.ckpt")
SHARED = [*SMALL, "test=false", "logger=none", "callbacks.progress=null", "callbacks.checkpoint.every_n_train_steps=2"]
CASES = {
    "images": (
        9,
        [
            *SHARED, "data.num_workers=1", "data.mixup_alpha=0.3", "model.dropout=0.2", "callbacks=ema", "synthesis=shared",
            "trainer.precision=bf16-mixed", "trainer.accumulate_grad_batches=2", "trainer.max_epochs=3",
            "trainer.limit_train_batches=5",
        ],
    ),
    "text": (
        14,
        [
            *SHARED, "task=masked_lm", "data=text_files", "data.files=texts/*.txt", "data.context=24", "data.batch_size=4",
            "data.max_tokens=120", "data.cache_dir=cache", "model.dropout=0.1", "trainer.limit_train_batches=8",
            "trainer.val_check_interval=6", "trainer.max_steps=14",
        ],
    ),
}  # fmt: skip
"""Command lines, and the steps that they train."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_a_killed_run_resumes_to_the_same_weights(holotrain, tmp_path, kind):
    draw = random.Random(1)
    Path("texts").mkdir()
    for number in range(40):
        Path(f"texts/{number}.txt").write_text(" ".join(draw.choices("abcdefgh", k=60)))
    steps, words = CASES[kind]
    holotrain.done("fit", *words, "hydra.run.dir=whole")
    assert multiprocessing.active_children() == []
    fit_and_kill(tmp_path, *words, "output_dir=killed")
    (run,) = Path("killed/fit").iterdir()
    assert torch.load(run / LAST, weights_only=True)["global_step"] < steps and not (run / "summary.json").exists()
    later = Path("killed/fit/9999-12-31_00-00-00")
    later.mkdir()
    expected = f"holotrain: resume=true: continuing {run}; {later} is later, but has no checkpoint\n"
    assert holotrain("fit", "resume=true", "output_dir=killed")[::2] == (0, expected)
    assert summary(run)["steps"] == summary(Path("whole"))["steps"] == steps
    assert_same_weights(Path("whole") / LAST, run / LAST)


@pytest.mark.slow
@pytest.mark.parametrize("step", [long(0), 4])
def test_ctrl_c_twice_says_what_was_kept_and_ends_a_sweep(holotrain, monkeypatch, step):
    from holotrain.checkpoints.exact_resume import ExactResume

    def interrupt(self, trainer, *_, **__):
        if trainer.global_step == step:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    words = ["fit", *SMALL, "test=false", "logger=none", "-m", "seed=1,2", "hydra.sweep.dir=sweep"]
    # A shell switches it off for what it runs in the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with monkeypatch.context() as patch:
        patch.setattr(ExactResume, "on_train_batch_start", interrupt)
        status, _, err = holotrain(*words)
    signal.signal(signal.SIGINT, before)
    at_first, line, *advice = err.splitlines()
    assert status == 128 + signal.SIGINT and at_first.startswith("holotrain: SIGINT: saving when this step is complete; SIGINT")
    kept = "the last state that was saved is in sweep/0/checkpoints/last.ckpt" if step else "nothing was saved yet"
    assert line == f"SIGINT ended the training at once; {kept}" and bool(advice) == bool(step)
    assert "ended by SIGINT" in Path("sweep/sweep.csv").read_text() and not Path("sweep/1").exists()
    holotrain.done(*words, "resume=true")
    assert ("sweep/1" / LAST).exists()
