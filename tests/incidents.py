"""A callback that lets something happen to one process of a training."""

import os
import signal

import lightning.pytorch as pl

from holotrain.errors import UserError


class Incident(pl.Callback):
    """
    Args:
        what: what process 1 does at the start of batch 4, if it was never restarted: ``mistake`` (it raises one), the name of
            a signal (it sends that to itself), or ``parent SIGTERM`` (to what started it).
    """

    def __init__(self, what: str) -> None:
        self.what = what

    def on_train_batch_start(self, trainer, module, batch, index) -> None:
        began_again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        if (trainer.global_rank, trainer.global_step) != (1, 4) or began_again:
            return
        if self.what == "mistake":
            raise UserError("give another disk")
        to, _, name = self.what.rpartition(" ")
        os.kill(os.getppid() if to == "parent" else os.getpid(), getattr(signal, name))
