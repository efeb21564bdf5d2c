"""A callback that kills a training at a chosen moment, once."""

import os
import signal
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.strategies import Strategy

from holotrain.checkpoints import distributed as checkpoints


class Killed(pl.Callback):
    """
    Args:
        dirpath: the folder of the checkpoints, which the program fills in; a file beside it says that the moment has come.
        moment: ``backward``, ``writing`` (half of a checkpoint is written) or ``test``.
        count: it is killed when the moment comes this often; the first time is 1.
        rank: the process that it happens in.
    """

    def __init__(self, dirpath: Path, moment: str, count: int, rank: int = 0) -> None:
        self.moment, self.left = moment, count
        self.mark = Path(dirpath).parent / "killed"
        if self.mark.exists() or int(os.environ.get("RANK", 0)) != rank:
            self.left = -1
        elif moment == "writing":
            self._watch_saves()
        elif moment == "test":
            self._watch_test()

    def now(self, moment: str) -> None:
        if moment == self.moment:
            self.left -= 1
            if self.left == 0:
                self.mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    def _watch_test(self) -> None:
        """A test runs without the callbacks of the training."""
        step = Strategy.test_step

        def watched(strategy, *args):
            self.now("test")
            return step(strategy, *args)

        Strategy.test_step = watched

    def _watch_saves(self) -> None:
        save = checkpoints.torch.save

        def half_saved(content, file, **options):
            if options:  # what processes send each other
                return save(content, file, **options)
            begin = file.tell()
            save(content, file)
            if self.left == 1:
                file.truncate((begin + file.tell()) // 2)
                file.flush()
            self.now("writing")

        checkpoints.torch.save = half_saved

    def on_after_backward(self, trainer, module) -> None:
        self.now("backward")
