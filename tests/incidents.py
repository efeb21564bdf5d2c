"""A callback that lets something happen to one process of a training, and one that writes down what a training holds on to."""

import gc
import json
import os
import signal
import time
from pathlib import Path

import lightning.pytorch as pl
import psutil

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


class Watching(pl.Callback):
    """Writes ``watched.json`` into the working directory at the end of training.

    Args:
        every: steps between two looks.
    """

    def __init__(self, every: int) -> None:
        self.every, self.looks, self.began = every, [], time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, *_) -> None:
        if trainer.global_step % self.every:
            return
        now, process = time.perf_counter(), psutil.Process()
        gc.collect()
        look = {"memory": process.memory_info().rss, "files": process.num_fds(), "threads": process.num_threads()}
        self.looks.append({"step": trainer.global_step, "seconds": (now - self.began) / self.every, **look})
        self.began = time.perf_counter()

    def on_train_end(self, *_) -> None:
        Path("watched.json").write_text(json.dumps(self.looks))
