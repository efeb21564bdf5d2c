"""A callback that lets something happen to one process of a training."""

import os
import signal

import lightning.pytorch as pl

from holotrain.errors import UserError


class Incident(pl.Callback):
    """
    Args:
        what: what process ``rank`` does at the start of batch ``step``, if it was never restarted: ``error`` or ``mistake``
            (it raises one), the name of a signal (it sends that to itself), or ``parent SIGINT`` (to what started it).
    """

    def __init__(self, what: str, rank: int = 1, step: int = 4) -> None:
        self.what, self.rank, self.step = what, rank, step

    def on_train_batch_start(self, trainer, module, batch, index) -> None:
        began_again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        if (trainer.global_rank, trainer.global_step) != (self.rank, self.step) or began_again:
            return
        if self.what == "error":
            raise RuntimeError("the disk is full")
        if self.what == "mistake":
            raise UserError("give another disk")
        to, _, name = self.what.rpartition(" ")
        os.kill(os.getppid() if to == "parent" else os.getpid(), getattr(signal, name))
