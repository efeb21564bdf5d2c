"""A callback that lets something happen to a training from outside, at its fifth step."""

import os
import signal
from pathlib import Path

import lightning.pytorch as pl
import psutil

from holotrain.checkpoints import distributed as checkpoints


class Happening(pl.Callback):
    """
    Args:
        dirpath: the folder of the checkpoints, which the program fills in.
        what: ``killed`` (a data worker), ``renamed`` (the folder of the run), or ``full`` (the disk: all that is in the
            folder, as far as it is written again).
    """

    def __init__(self, dirpath: Path, what: str) -> None:
        self.folder, self.what = Path(dirpath).parent, what

    def on_train_batch_start(self, trainer, module, batch, index) -> None:
        if trainer.global_step == 4:
            getattr(self, self.what)()

    def killed(self) -> None:
        os.kill(psutil.Process().children()[0].pid, signal.SIGKILL)

    def renamed(self) -> None:
        self.folder.rename(self.folder.with_name("renamed"))

    def full(self) -> None:
        for log in self.folder.rglob("events.*"):  # opened again for each write
            log.unlink()
            log.symlink_to("/dev/full")

        def save(held, file) -> None:
            with open("/dev/full", "wb", buffering=0) as full:
                full.write(b"1")

        checkpoints.torch.save = save
