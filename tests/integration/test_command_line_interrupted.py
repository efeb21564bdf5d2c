"""Ctrl-C, once or several times: what is said, what is kept, and how it is resumed."""

import os
import shlex
import signal
from pathlib import Path

import lightning.pytorch as pl
import pytest
import yaml
from covering import slow
from left_by_runs import assert_same_weights
from small_run import SMALL

LAST = Path("checkpoints/last.ckpt")


def interrupts(holotrain, monkeypatch, hook, step, times, *words):
    """Runs ``fit``, to which Ctrl-C is sent so many times in a row, in a hook of a callback at an optimizer step."""
    from holotrain.checkpoints.exact_resume import ExactResume

    def interrupt(self, trainer, *_, **__):
        if trainer.global_step == step:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)

    # A shell switches it off for what it runs in the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with monkeypatch.context() as patch:
        patch.setattr(ExactResume, hook, interrupt)
        result = holotrain("fit", *SMALL, "test=false", "logger=none", *words)
    signal.signal(signal.SIGINT, before)
    return result


AT_FIRST = "holotrain: SIGINT: saving when this step is complete; SIGINT again ends at once, without saving\n"


@pytest.mark.parametrize("times", [2, slow(3)])
def test_ctrl_c_several_times_says_what_was_kept(holotrain, monkeypatch, times):
    status, _, err = interrupts(holotrain, monkeypatch, "on_train_batch_start", 4, times, "hydra.run.dir=run")
    assert status == 128 + signal.SIGINT
    assert err == (
        f"{AT_FIRST}SIGINT ended the training at once; the last state that was saved is in run/checkpoints/last.ckpt\n"
        "resume with: python -m holotrain fit resume=true hydra.run.dir=run test=false\n"
    )
    holotrain.done("fit", "resume=true", "hydra.run.dir=run", "test=false")
    assert holotrain("fit", *SMALL, "test=false", "logger=none", "hydra.run.dir=whole")[0] == 0
    assert_same_weights(Path("run") / LAST, Path("whole") / LAST)


@pytest.mark.parametrize("hook, times, said", [slow("setup", 1, ""), ("on_train_batch_start", 2, AT_FIRST)])
def test_ctrl_c_before_anything_was_saved_says_so(holotrain, monkeypatch, hook, times, said):
    """In a sweep, whose next job does not begin."""
    status, _, err = interrupts(holotrain, monkeypatch, hook, 0, times, "-m", "seed=1,2", "hydra.sweep.dir=sweep")
    assert status == 128 + signal.SIGINT, err
    assert err == f"{said}SIGINT ended the training at once; nothing was saved yet\n"
    assert "ended by SIGINT" in Path("sweep/sweep.csv").read_text() and not Path("sweep/1").exists()
    holotrain.done("fit", *SMALL, "test=false", "logger=none", "-m", "seed=1,2", "hydra.sweep.dir=sweep", "resume=true")
    assert ("sweep/1" / LAST).exists()


def test_ctrl_c_before_the_run_begins_is_a_line(holotrain, monkeypatch):
    def interrupted(words):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("holotrain.cli.parse", interrupted)
        assert holotrain("fit")[::2] == (128 + signal.SIGINT, "SIGINT ended fit\n")


class Every(pl.Callback):
    """A callback with an option that must be given, and one that need not."""

    def __init__(self, period: int, offset: int = 0) -> None:
        self.period, self.offset = period, offset


@pytest.mark.slow
def test_the_command_that_is_said_resumes_with_the_options_of_ones_own_class(holotrain, monkeypatch):
    name = f"{Every.__module__}.{Every.__name__}"
    words = [f"+callbacks.every._target_={name}", "+callbacks.every.period=3", "+callbacks.every.offset=2"]
    status, _, err = interrupts(holotrain, monkeypatch, "on_train_batch_start", 4, 1, "hydra.run.dir=run", *words)
    assert status == 128 + signal.SIGINT
    said = shlex.split(err.rpartition("python -m holotrain ")[2])
    holotrain.done(*said)
    kept = yaml.safe_load(Path("run/config.yaml").read_text())["callbacks"]["every"]
    assert (kept["period"], kept["offset"]) == (3, 2)
