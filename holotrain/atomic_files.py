"""Files that are complete whenever they can be seen: written beside their place under another name, then renamed."""

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path, ending: str | None = None) -> Generator[Path]:
    """Yields a name beside ``path`` to write to. The file there is renamed to ``path`` at the end, or removed after an error.

    Args:
        ending: of that name; None: the number of this process, so that several processes may write at once. With a fixed one,
            what a killed process has left is overwritten.
    """
    temporary = path.with_name(f".{path.name}.{ending or os.getpid()}")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):  # the folder may not exist
            temporary.unlink()
        raise
