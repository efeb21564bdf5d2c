"""What happens to a run from outside, in one line: a data worker dies, a disk is full, the run's folder is gone."""

import os
import re
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from errno import EDQUOT, EIO, ENOSPC, EROFS
from pathlib import Path
from traceback import walk_tb
from typing import Any

import lightning.pytorch as pl
from tensorboard.summary.writer.event_file_writer import _AsyncWriterThread

from holotrain.commands.run_folder import Run
from holotrain.errors import MachineFailure, UserError

NOT_WRITTEN = (EDQUOT, EIO, ENOSPC, EROFS)
"""Errors of disks."""


WORKER = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<pid>[\d, ]+)\) (?:is )?(?P<how>killed by signal: [\w ]+|exited unexpectedly)"
)
"""What torch says of a worker that died. Its handler of SIGCHLD may raise that anywhere."""


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
        if dead := dead_worker(error):
            likely = "probably for lack of memory; fewer data.num_workers or smaller batches need less"
            raise MachineFailure(f"{dead}, {likely}{run.hint()}") from error
        failed = of_the_system(error)
        if failed is None or failed.errno not in NOT_WRITTEN:
            raise
        raise MachineFailure(f"{_name(failed) or run.folder} cannot be written: {failed.strerror}{run.hint()}") from error
    finally:
        threading.excepthook = shown


def dead_worker(error: Exception) -> str | None:
    """Which data worker died, and how, if that led to the error."""
    if isinstance(error, RuntimeError) and (found := WORKER.search(str(error))):
        return f"data worker {found['pid']} died ({found['how']})"
    if not isinstance(error, ConnectionError | EOFError):  # in the middle of a batch from a worker
        return None
    for frame, _ in walk_tb(error.__traceback__):
        if frame.f_code.co_name == "_try_get_data":
            dead = [worker.pid for worker in frame.f_locals["self"]._workers if worker.exitcode not in (None, 0)]
            return f"data worker {', '.join(map(str, dead))} died (exited unexpectedly)"
    return None


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
