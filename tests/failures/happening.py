"""A callback that lets something happen to a training from outside."""

import os
import shutil
import signal
from pathlib import Path

import lightning.pytorch as pl
import psutil

from holotrain.checkpoints import distributed as checkpoints


class Happening(pl.Callback):
    """
    Args:
        dirpath: the folder of the checkpoints, which the program fills in.
        what: ``killed`` (a data worker of process ``rank``), ``renamed`` or ``removed`` (the folder of the run), or
            ``full`` (the disk: all that is in the folder, as far as it is written again).
        step: when, in steps, unless the training was started again.
        rank: in which process.
    """

    def __init__(self, dirpath: Path, what: str, step: int = 4, rank: int = 0) -> None:
        self.folder, self.what, self.step, self.rank = Path(dirpath).parent, what, step, rank

    def on_train_batch_start(self, trainer, module, batch, index) -> None:
        if (trainer.global_step, trainer.global_rank) != (self.step, self.rank):
            return
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            getattr(self, self.what)()

    def killed(self) -> None:
        os.kill(psutil.Process().children()[0].pid, signal.SIGKILL)

    def renamed(self) -> None:
        self.folder.rename(self.folder.with_name("renamed"))

    def removed(self) -> None:
        shutil.rmtree(self.folder)

    def full(self) -> None:
        for log in (*self.folder.rglob("events.*"), *self.folder.rglob("metrics.csv")):  # opened again for each write
            log.unlink()
            log.symlink_to("/dev/full")

        def save(held, file) -> None:
            with open("/dev/full", "wb", buffering=0) as full:
                full.write(b"1")

        checkpoints.torch.save = save
