"""Standard streams that stay open: if the shell has closed them, or nobody reads them any more, a run goes on."""

import io
import os
import sys


class Unbreakable(io.FileIO):
    """A standard stream. From the first error on, what is written to it is dropped.

    Attributes:
        error: such as a reader that has left, or a disk that is full; None: there was none.
    """

    error: OSError | None = None

    def write(self, data) -> int:
        if self.error is None:
            try:
                return super().write(data)
            except OSError as error:
                self.error = error
        return memoryview(data).nbytes


def open_streams() -> None:
    """Makes ``sys.stdout`` and ``sys.stderr`` unbreakable. A closed one is opened first, else the next file would be it."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(handle, True)
    os.close(handle)
    for number, name in ((1, "stdout"), (2, "stderr")):
        buffer = io.BufferedWriter(Unbreakable(number, "w", closefd=False))
        encoding = getattr(getattr(sys, name), "encoding", "utf-8")
        at_once = getattr(getattr(sys, name), "write_through", False)  # python -u
        by_line = at_once or number == 2 or buffer.isatty()
        # Names need not be UTF-8.
        text = io.TextIOWrapper(buffer, encoding, "backslashreplace", line_buffering=by_line, write_through=at_once)
        setattr(sys, name, text)


def output_error() -> OSError | None:
    """Why not all of the output could be written; None: it was."""
    sys.stdout.flush()
    return getattr(getattr(sys.stdout.buffer, "raw", None), "error", None)
