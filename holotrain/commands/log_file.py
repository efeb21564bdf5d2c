"""log.txt: what a run has printed, in its folder."""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
import threading
import time
import traceback
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO

from holotrain.errors import UserError
from holotrain.files import WITHOUT_LINKS

LOG = "log.txt"

LOCK = ".lock"
"""The file that keeps other runs out of a folder."""

REDRAWN = 8
"""Lines that a progress bar on a terminal may still draw again."""

PIECES = re.compile(r"(?P<up>\x1b\[\d*A)|\x1b\[[\d;?]*[A-Za-z]|\x1b\][^\x07\x1b]*(\x07|\x1b\\)|\n|\r|[^\n\r\x1b]+|\x1b")
"""What a text for a terminal is made of: up by some lines, other commands, ends of lines, returns, characters."""


@contextmanager
def logged(folder: Path, words: Sequence[str] = (), of_main: bool = True) -> Generator[None]:
    """Inside, what is printed goes into the folder's log, too, and so does the error that ends it. Nested in itself, it does
    nothing more. A run that leaves nothing else in its folder leaves no log.

    Args:
        words: the command line, which the log begins with.
        of_main: False: another process of the run; what it prints on the standard error is all that is logged of it.
    """
    if getattr(sys.stderr, "folder", None) == folder:
        yield
        return
    log = Log(folder, sys.stdout is not None and sys.stdout.isatty())
    if words:
        log.add(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  holotrain {shlex.join(words)}")
    try:
        with ExitStack() as stack:
            stack.enter_context(_copied(sys.stderr, log, redirect_stderr))
            if of_main:
                stack.enter_context(_copied(sys.stdout, log, redirect_stdout))
            yield
    except (Exception, KeyboardInterrupt) as error:
        if of_main:
            log.add(_said(error))
        raise
    finally:
        log.close()


def _said(error: BaseException) -> str:
    if isinstance(error, UserError):
        return f"holotrain: {error}"
    return "ended by SIGINT" if isinstance(error, KeyboardInterrupt) else "".join(traceback.format_exception(error)).rstrip()


class Log:
    """The log of a run, which is appended to. What cannot be written is dropped, so that no training ends for its log.

    Args:
        folder: its folder. Lines wait until it has another file.
        redraws: the last lines wait, because a bar on a terminal may draw them again.
    """

    def __init__(self, folder: Path, redraws: bool) -> None:
        self.folder = folder
        self._kept = REDRAWN if redraws else 0
        self._waiting: list[str] = []
        self._file: int | None = None
        self._owner, self._lock = os.getpid(), threading.Lock()  # a forked data worker has a copy; threads print, too

    def add(self, line: str) -> None:
        """Nothing in another process than the log's, or after it was closed."""
        if self._owner == os.getpid():
            with self._lock:
                self._waiting.append(line)
                self._write(self._kept)

    def take_back(self, count: int) -> None:
        """Drops the last lines, if they still wait."""
        with self._lock:
            del self._waiting[-count:]

    def close(self) -> None:
        with self._lock:
            self._write()
            self._owner = -1
            if self._file is not None:
                with suppress(OSError):
                    os.close(self._file)

    def _write(self, kept: int = 0) -> None:
        count = len(self._waiting) - kept
        if count <= 0:
            return
        with suppress(OSError):
            if self._file is None:
                if all(entry.name == LOCK for entry in self.folder.iterdir()):
                    return
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | WITHOUT_LINKS
                self._file = os.open(self.folder / LOG, flags, 0o666)
            text = "".join(f"{line}\n" for line in self._waiting[:count])
            os.write(self._file, text.encode("utf-8", "backslashreplace"))  # at once, also beside other processes
        del self._waiting[:count]


class Copied:
    """A text stream, with a copy of its lines in a log: as a terminal shows them at last, without colours."""

    def __init__(self, stream: TextIO, log: Log) -> None:
        self._stream, self._log, self.folder = stream, log, log.folder
        self._line, self._returned = "", False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        for piece in PIECES.finditer(text):
            self._take(piece[0], piece["up"])
        return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def _take(self, piece: str, up: str | None) -> None:
        if piece == "\n":
            self._log.add(self._line)
            self._line, self._returned = "", False
        elif piece == "\r":
            self._returned = True
        elif up:
            self._log.take_back(int(up[2:-1] or 1))
            self._returned = True
        elif not piece.startswith("\x1b"):
            self._line = piece if self._returned else self._line + piece
            self._returned = False

    def finish(self) -> None:
        """Logs a line that has not ended."""
        if self._line:
            self._take("\n", None)


@contextmanager
def _copied(stream: TextIO | None, log: Log, redirect: Any) -> Generator[None]:
    """Inside, what is printed to a standard stream, by logging too, is copied; None: there is none."""
    if stream is None:
        yield
        return
    copied: Any = Copied(stream, log)
    with redirect(copied):
        _redirect_handlers(stream, copied)
        try:
            yield
        finally:
            copied.finish()
            _redirect_handlers(copied, stream)  # also those that libraries made meanwhile


def _redirect_handlers(before: Any, after: Any) -> None:
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            if vars(handler).get("stream") is before:  # one that asks for sys.stderr each time has none of its own
                handler.setStream(after)
