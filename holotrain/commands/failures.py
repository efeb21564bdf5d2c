"""What happens to a run from outside, in one line: a data worker dies, a disk is full, the run's folder is gone."""

import os
import re
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from errno import EDQUOT, EIO, ENOSPC, EROFS
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from tensorboard.summary.writer.event_file_writer import _AsyncWriterThread

from holotrain.commands.run_folder import Run
from holotrain.errors import MachineFailure, UserError

NOT_WRITTEN = (EDQUOT, EIO, ENOSPC, EROFS)
"""Errors of disks."""


WORKER = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:is )?(killed by signal: [\w ]+|exited unexpectedly)")


@contextmanager
def machine_failures(run: Run) -> Generator[None]:
    """
    Raises:
        MachineFailure: a data worker died, or a disk could not be written. It says how to resume.
    """
    shown, threading.excepthook = threading.excepthook, _all_but_writers(threading.excepthook)
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and (worker := WORKER.search(str(error))):  # torch's handler of SIGCHLD, anywhere
            likely = "probably for lack of memory; fewer data.num_workers or smaller batches need less"
            raise MachineFailure(f"data worker {worker[1]} died ({worker[2]}), {likely}{run.hint()}") from error
        failed = of_the_system(error)
        if failed is None or failed.errno not in NOT_WRITTEN:
            raise
        raise MachineFailure(f"{_name(failed) or run.folder} cannot be written: {failed.strerror}{run.hint()}") from error
    finally:
        threading.excepthook = shown


def of_the_system(error: BaseException | None) -> OSError | None:
    """The OSError that this error is, or that led to it: Lightning raises a ValueError for what TensorBoard cannot write."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _name(error: OSError) -> str | None:
    return os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else None


def _all_but_writers(show: Callable[[Any], object]) -> Callable[[Any], object]:
    """Shows errors of threads, but not those of TensorBoard's writers, which are raised in the main thread, too."""
    return lambda given: None if isinstance(given.thread, _AsyncWriterThread) else show(given)


class SameFolder(pl.Callback):
    """Ends a training whose folder was renamed or removed, before a checkpoint makes a new one there.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found = folder.stat() if folder.is_dir() else None  # which another machine need not have

    def check(self) -> None:
        """
        Raises:
            UserError: the folder has another name, or is gone.
        """
        with suppress(OSError):
            if self.found is not None and os.path.samestat(self.found, self.folder.stat()):
                return
        again = "if it was renamed, resume with resume=true hydra.run.dir=<its new name>"
        raise UserError(f"{self.folder}: the folder was renamed or removed during the training, which ends; {again}")

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.is_global_zero:
            self.check()
