"""A callback that ends a training with a signal at a chosen moment, once."""

import os
import signal
import time
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.strategies import Strategy

from holotrain.checkpoints import distributed as checkpoints

APART = 0.05
"""Seconds between signals: another process receives two of a kind that come at once as one."""


class Killed(pl.Callback):
    """
    Args:
        dirpath: the folder of the checkpoints, which the program fills in; a file beside it says that the moment has come.
        moment: ``built``, ``setup``, ``batch``, ``backward``, ``validation``, ``writing`` (half of a checkpoint is written),
            ``written`` (under its temporary name), ``renamed``, ``removing`` (a file that another has replaced), ``epoch``
            or ``test``.
        count: the signals are sent when the moment comes this often; the first time is 1.
        names: of the signals, one after the other, such as ``SIGINT SIGINT``.
        rank: the process that it happens in.
        to: ``self`` or ``parent``: which process receives the signals.
        job: only in this job of a sweep.
    """

    def __init__(
        self, dirpath: Path, moment: str, count: int, names: str, rank: int = 0, to: str = "self", job: str | None = None
    ) -> None:
        self.moment, self.left, self.names, self.to = moment, count, names.split(), to
        self.mark = Path(dirpath).parent / "killed"
        others = job is not None and Path(dirpath).parent.name != str(job)
        self.awaited = not (self.mark.exists() or others or int(os.environ.get("RANK", 0)) != rank)
        if self.awaited and moment in ("writing", "written", "renamed", "removing"):
            self._watch_files()
        if self.awaited and moment == "test":
            self._watch_test()
        self.now("built")

    def _watch_test(self) -> None:
        """A test runs without the callbacks of the training."""
        step = Strategy.test_step

        def watched(strategy, *args):
            self.now("test")
            return step(strategy, *args)

        Strategy.test_step = watched

    def now(self, moment: str) -> None:
        if not self.awaited or moment != self.moment:
            return
        self.left -= 1
        if self.left == 0:
            self.awaited = False
            self.mark.touch()
            for name in self.names:
                os.kill(os.getppid() if self.to == "parent" else os.getpid(), getattr(signal, name))
                if self.to == "parent":
                    time.sleep(APART)

    def _watch_files(self) -> None:
        save, replace, remove = checkpoints.torch.save, Path.replace, Strategy.remove_checkpoint

        def half_saved(held, file, *args, **options):
            begun = file.tell()
            save(held, file, *args, **options)
            file.flush()
            if self.awaited and self.moment == "writing":
                whole = file.tell()
                file.truncate((begun + whole) // 2)
                self.now("writing")
                file.seek(begun)  # what follows if the signal lets the process go on
                file.truncate()
                save(held, file, *args, **options)

        def replaced(path, target):
            ours = Path(target).suffix == ".ckpt"
            if ours:
                self.now("written")
            result = replace(path, target)
            if ours:
                self.now("renamed")
            return result

        def removed(strategy, path):
            self.now("removing")
            remove(strategy, path)

        checkpoints.torch.save, Path.replace, Strategy.remove_checkpoint = half_saved, replaced, removed

    def setup(self, trainer, module, stage) -> None:
        if stage == "fit":
            self.now("setup")

    def on_train_batch_start(self, trainer, module, batch, index) -> None:
        self.now("batch")

    def on_after_backward(self, trainer, module) -> None:
        self.now("backward")

    def on_validation_batch_start(self, trainer, module, batch, index, dataloader_idx=0) -> None:
        self.now("validation")

    def on_train_epoch_end(self, trainer, module) -> None:
        self.now("epoch")
