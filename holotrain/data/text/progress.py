"""Progress of reading large files."""

import sys
import time
from types import TracebackType

EVERY = 10.0
"""Seconds between two lines if the output is not a terminal."""


class Progress:
    """A progress bar on a terminal; elsewhere a line every ``EVERY`` seconds.

    Args:
        what: is being done.
        total: number of bytes.
    """

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done = what, max(total, 1), 0
        self._bar = None
        self._said = time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def advance(self, size: int) -> None:
        """Adds ``size`` bytes to what is done."""
        self.done += size
        if sys.stdout.isatty():
            self._draw()
        elif time.monotonic() - self._said > EVERY:
            self._said = time.monotonic()
            print(f"{self.what}: {self.done / 1e6:.0f} of {self.total / 1e6:.0f} MB", flush=True)

    def _draw(self) -> None:
        if self._bar is None:
            from rich.progress import Progress as Bar

            self._bar = Bar(transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self.what, total=self.total)
        self._bar.update(self._task, completed=self.done)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
