"""What happens to a run from outside, in one line: a data worker dies, a disk is full, the run's folder is gone."""

import os
import re
import sys
import threading
import traceback
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from errno import EDQUOT, EFBIG, EIO, EMFILE, ENFILE, ENOSPC, EROFS
from pathlib import Path
from traceback import walk_tb
from typing import Any

import lightning.pytorch as pl
import torch
from tensorboard.summary.writer.event_file_writer import _AsyncWriterThread

from holotrain.commands.run_folder import Run
from holotrain.errors import MachineFailure, UserError

FREE = "free some, or name another folder"

LIMITS = {
    EMFILE: "raise the limit with ulimit -n, or lower data.num_workers",
    ENFILE: "lower data.num_workers",
    EFBIG: "raise the limit with ulimit -f",
    ENOSPC: FREE,
    EDQUOT: FREE,
    EIO: "look at the disk",
    EROFS: "name another folder",
}
"""Errors of the system that are no mistake of a program's, and what helps."""

WORKER = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<pid>[\d, ]+)\) (?:is )?(?P<how>killed by signal: [\w ]+|exited unexpectedly)"
)
"""What torch says of a worker that died. Its handler of SIGCHLD may raise that anywhere."""


@contextmanager
def machine_failures(run: Run) -> Generator[None]:
    """
    Raises:
        MachineFailure: a data worker died, or a limit of the system or a disk's failure ended the run, maybe in a library's
            thread. It says how to resume.
    """
    hooks = threading.excepthook, sys.unraisablehook
    threading.excepthook = lambda failed: None if _is_of_a_writer(failed) else hooks[0](failed)
    sys.unraisablehook = lambda failed: None if _is_of_a_worker(failed) else hooks[1](failed)
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        dead, reached = dead_worker(error), _limit(error)
        if dead:
            text = f"{dead}, probably for lack of memory; fewer data.num_workers or smaller batches need less"
        elif reached:
            name, code = getattr(reached[0], "filename", None), reached[1]
            where = os.fsdecode(name) if isinstance(name, str | bytes) else run.folder
            text = f"{where}: {os.strerror(code)}; {LIMITS[code]}"
        else:
            raise
        sys.unraisablehook = lambda one: None  # of objects that are half made, or wait for the dead
        for each in (error, reached[0] if reached else error):
            traceback.clear_frames(each.__traceback__)  # they hold those, and open files
        raise MachineFailure(f"{text}{run.hint()}") from None
    finally:
        threading.excepthook, sys.unraisablehook = hooks


def _is_of_a_writer(failed: threading.ExceptHookArgs) -> bool:
    """Whether the main thread gets it, too."""
    return isinstance(failed.thread, _AsyncWriterThread) or _limit(failed.exc_value) is not None


def _is_of_a_worker(failed: Any) -> bool:
    """Whether what ends the run is raised elsewhere; torch says it anywhere, and again."""
    if "DataLoaderIter.__del__" in getattr(failed.object, "__qualname__", ""):
        return True
    return isinstance(failed.exc_value, Exception) and dead_worker(failed.exc_value) is not None


def _limit(error: BaseException | None) -> tuple[BaseException, int] | None:
    """The error of the system that led to this one, which may be a library's with its words, and its code; None: none did."""
    for each in _causes(error):
        for code in LIMITS if isinstance(each, OSError | RuntimeError) else ():
            if os.strerror(code) in str(each):
                return each, code
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that led to it, the last one first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


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


class SameFolder(pl.Callback):
    """Ends a training whose folder was renamed or removed, before a checkpoint makes a new one there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found = folder.stat() if folder.is_dir() else None  # which another machine need not have

    def check(self) -> None:
        """Raises a UserError if the folder has another name, or is gone."""
        with suppress(OSError):
            if self.found is not None and os.path.samestat(self.found, self.folder.stat()):
                return
        again = "if it was renamed, resume with resume=true hydra.run.dir=<its new name>"
        raise UserError(f"{self.folder}: the folder was renamed or removed during the training, which ends; {again}")

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.is_global_zero:
            self.check()


SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")
"""Parts of the RuntimeErrors of torch's allocators (CUDA, MPS, CPU, Windows) and NVIDIA's libraries."""


class OutOfMemory(Exception):
    """An allocation failed. The message is the requested size, or empty if it is not known."""


@contextmanager
def as_out_of_memory() -> Generator[None]:
    """Raises an OutOfMemory instead of the error that an allocator of torch, NumPy or Python raises inside."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(sign in str(error) for sign in SIGNS):
            raise
        if found := re.search(r"tried to allocate (\d+) bytes", str(error)):
            raise OutOfMemory(f"{int(found[1]) / 2**20:.1f} MiB") from error
        found = re.search(r"(?:tried|unable) to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
        raise OutOfMemory(found[1] if found else "") from error
