"""SIGTERM anywhere within accumulated batches: what is resumed ends with the weights of an uninterrupted run, bit for bit."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
from left_by_runs import assert_same_weights, summary
from small_run import SMALL

LAST = Path("checkpoints/last.ckpt")
ACCUMULATED = [
    *SMALL, "trainer.accumulate_grad_batches=4", "trainer.limit_train_batches=10", "trainer.val_check_interval=3",
    "model.dropout=0.2", "data.mixup_alpha=0.3", "synthesis=associative", "callbacks=ema", "test=false", "logger=none",
]  # fmt: skip
"""Two epochs of ten batches: optimizer steps after 4, 8 and 10 of them."""


def whole(holotrain):
    assert holotrain("fit", *ACCUMULATED, "hydra.run.dir=whole")[0] == 0
    return Path("whole") / LAST


def moments(count):
    """One that is certainly in the middle of an accumulated batch, and random ones."""
    draw = random.Random(1)
    return [5, *(draw.randrange(19) for _ in range(count - 1))]


@pytest.mark.parametrize("count", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_a_signal_within_an_accumulated_batch_loses_nothing(holotrain, monkeypatch, count):
    from holotrain.callbacks import ExactResume

    reference = whole(holotrain)
    for at in moments(count):

        def terminate(self, trainer, module, at=at):
            if trainer.fit_loop.epoch_loop.total_batch_idx == at:
                os.kill(os.getpid(), signal.SIGTERM)

        monkeypatch.setattr(ExactResume, "on_after_backward", terminate)
        status, _, err = holotrain("fit", *ACCUMULATED, f"hydra.run.dir=at{at}")
        assert status == 128 + signal.SIGTERM and "SIGTERM ended the training" in err
        monkeypatch.setattr(ExactResume, "on_after_backward", pl.Callback.on_after_backward)
        assert summary(Path(f"at{at}"))["status"] == "interrupted"
        status, _, err = holotrain("fit", "resume=true", f"hydra.run.dir=at{at}")
        assert (status, err) == (0, "")
        assert_same_weights(Path(f"at{at}") / LAST, reference)


SLOWED = """
import sys, time
from holotrain.callbacks import ExactResume
def slow(self, trainer, module):
    print("batch", flush=True)
    time.sleep(0.3)
ExactResume.on_after_backward = slow
from holotrain.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("batch", [2, 7])
def test_a_signal_from_outside_loses_nothing(holotrain, batch):
    """Sent to a process of its own in some batch, while it computes."""
    reference = whole(holotrain)
    words = [sys.executable, "-c", SLOWED, "fit", *ACCUMULATED, "hydra.run.dir=outside"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for _ in range(batch):
            while process.stdout.readline() not in ("batch\n", ""):
                pass
        time.sleep(random.Random(batch).uniform(0, 0.3))
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert summary(Path("outside"))["status"] == "interrupted"
    assert holotrain("fit", "resume=true", "hydra.run.dir=outside")[0] == 0
    assert_same_weights(Path("outside") / LAST, reference)
