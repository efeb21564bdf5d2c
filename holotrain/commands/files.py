"""Writes files so that none is ever half written."""

import csv
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from holotrain.atomic_files import replacing
from holotrain.errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


HELD: set[Path] = set()
"""The folders that runs of this process are in: to the system, whose locks are a process's, they are one."""


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keeps other runs out of a folder. If this process dies, the system lets them in.

    Raises:
        UserError: another run is in it.
    """
    path, place = folder / ".lock", folder.resolve()
    refused = UserError(f"{folder}: another run is writing into it; wait until it ends, or name another folder")
    if place in HELD:
        raise refused
    with ExitStack() as stack:
        HELD.add(place)
        stack.callback(HELD.discard, place)
        if fcntl is not None:
            with suppress(OSError):  # a folder that cannot be written, a file system without locks
                file = stack.enter_context(path.open("w"))
                if not _locked(file, path):
                    raise refused
                stack.callback(path.unlink, missing_ok=True)
        yield


def _locked(file: IO, path: Path) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's, not inherited by data workers
        return os.fstat(file.fileno()).st_ino == path.stat().st_ino  # not if the run before has just removed it
    except (BlockingIOError, PermissionError, FileNotFoundError):
        return False


def write_table(path: Path, columns: Sequence[object], rows: Iterable[Sequence[object]]) -> None:
    """Writes a CSV file. Text that a spreadsheet would take for a formula is written after an apostrophe, as one would type it.

    Raises:
        UserError: the file cannot be written.
    """
    text = io.StringIO()
    csv.writer(text).writerows([_not_run(cell) for cell in row] for row in (columns, *rows))
    write_whole(path, text.getvalue())


def _not_run(cell: object) -> object:
    if not isinstance(cell, str) or not cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n")):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is complete as soon as it can be seen.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
