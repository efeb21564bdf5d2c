"""A callback that writes down what a training holds on to: memory, open files, threads."""

import gc
import json
import time
from pathlib import Path

import lightning.pytorch as pl
import psutil


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
