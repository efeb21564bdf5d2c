"""Limits of what files become when they are read: a few bytes of Parquet or Arrow can claim to be any number of rows."""

import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from holotrain.errors import UserError
from holotrain.numeric import require_at_least

EXPANSION = 100.0
"""What is read may be so many times as large as the files: a Parquet file of 300 kB can repeat a text until a disk is full."""

ALWAYS = 2**30
"""Bytes that files of any size may become."""

WHOLE = 2**60
"""More bytes than any machine has; an expansion may be any number."""

SPARE = 2**29
"""Bytes of memory that reading needs besides what is read."""


class Expanding:
    """Data modules whose files may hold rows that are larger than they are.

    Args:
        max_expansion: how many times as large as your files what is read from them may be, beyond 1 GiB
        options: those of the next class
    """

    def __init__(self, max_expansion: float = 100.0, **options: Any) -> None:
        super().__init__(**options)
        require_at_least(1, max_expansion=max_expansion)
        self.expansion = max_expansion


def most_of(paths: Iterable[Path], expansion: float) -> int:
    """The bytes that files may become."""
    return int(min(max(expansion * sum(path.stat().st_size for path in paths), ALWAYS), WHOLE))


def limited(most: int, refusal: str, tables: Callable[..., Iterator], *args: Any, **kwargs: Any) -> Iterator:
    """The tables, or pairs of a key and a table, that a function yields, up to ``most`` bytes, in memory too.

    Raises:
        UserError: with the text ``refusal``, they are larger.
    """
    size, found = 0, tables(*args, **kwargs)
    while True:
        try:
            with memory_up_to(most):
                each = next(found, None)
        except MemoryError as error:
            raise UserError(refusal) from error
        if each is None:
            return
        size += (each[1] if isinstance(each, tuple) else each).nbytes
        if size > most:
            raise UserError(refusal)
        yield each


@contextmanager
def memory_up_to(more: int) -> Generator[None]:
    """Within it, on Linux, this process gets so many bytes of memory and ``SPARE``: what asks for more raises a MemoryError.

    A batch of rows is decoded in one call of a library, and only the system can stop it. Mapped files do not count.
    """
    if sys.platform != "linux":
        yield
        return
    import resource

    soft, hard = _limits()
    limit = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize() + more + SPARE
    resource.setrlimit(resource.RLIMIT_DATA, (limit if soft == resource.RLIM_INFINITY else min(limit, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@lru_cache
def _limits() -> tuple[int, int]:
    """The limits of this process before any of ours, which are put back even if two threads read at once."""
    import resource

    return resource.getrlimit(resource.RLIMIT_DATA)
