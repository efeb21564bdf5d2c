"""Ctrl-C, once or several times: what is said, what is kept, and how it is resumed."""

import os
import signal
from pathlib import Path

from small_run import SMALL

LAST = Path("checkpoints/last.ckpt")


def interrupts(holotrain, monkeypatch, step, times, *words):
    """Runs ``fit``, to which Ctrl-C is sent so many times in a row, at an optimizer step."""
    from holotrain.checkpoints.exact_resume import ExactResume

    def interrupt(self, trainer, *_, **__):
        if trainer.global_step == step:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)

    # A shell switches it off for what it runs in the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with monkeypatch.context() as patch:
        patch.setattr(ExactResume, "on_train_batch_start", interrupt)
        result = holotrain("fit", *SMALL, "test=false", "logger=none", *words)
    signal.signal(signal.SIGINT, before)
    return result


AT_FIRST = "holotrain: SIGINT: saving when this step is complete; SIGINT again ends at once, without saving\n"


def test_ctrl_c_twice_says_what_was_kept(holotrain, monkeypatch):
    status, _, err = interrupts(holotrain, monkeypatch, 4, 2, "hydra.run.dir=run")
    assert status == 128 + signal.SIGINT
    assert err == (
        f"{AT_FIRST}SIGINT ended the training at once; the last state that was saved is in run/checkpoints/last.ckpt\n"
        "resume with: python -m holotrain fit resume=true hydra.run.dir=run test=false\n"
    )


def test_ctrl_c_before_anything_was_saved_says_so(holotrain, monkeypatch):
    """In a sweep, whose next job does not begin."""
    status, _, err = interrupts(holotrain, monkeypatch, 0, 2, "-m", "seed=1,2", "hydra.sweep.dir=sweep")
    assert status == 128 + signal.SIGINT, err
    assert err == f"{AT_FIRST}SIGINT ended the training at once; nothing was saved yet\n"
    assert "ended by SIGINT" in Path("sweep/sweep.csv").read_text() and not Path("sweep/1").exists()
    holotrain.done("fit", *SMALL, "test=false", "logger=none", "-m", "seed=1,2", "hydra.sweep.dir=sweep", "resume=true")
    assert ("sweep/1" / LAST).exists()


def test_ctrl_c_before_the_run_begins_is_a_line(holotrain, monkeypatch):
    def interrupted(words):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("holotrain.cli.parse", interrupted)
        assert holotrain("fit")[::2] == (128 + signal.SIGINT, "SIGINT ended fit\n")
