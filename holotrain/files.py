"""Files: written so that they are complete whenever they can be seen, and read as data that anybody may have written."""

import json
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

DEEPEST = 100
"""Levels of lists and mappings in each other."""

MOST = 10_000_000
"""Values in a file; a list that stands in it twice counts twice."""

LARGEST = 2**26
"""Bytes of a file of JSON."""


def read_json(path: Path) -> Any:
    """The content of a file of JSON.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON, or no JSON of ours: too large, nested too deep, or with text that is not Unicode.
    """
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is no file")  # a pipe would wait for a writer
    with path.open("rb") as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ValueError(f"it has more than {LARGEST} bytes")
    return from_json(content)


def from_json(text: str | bytes) -> Any:
    """The content of a text of JSON. Raises a ValueError as :func:`read_json` does."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep") from error
    require_shallow(value)
    return value


def require_shallow(value: Any) -> None:
    """
    Raises:
        ValueError: lists and mappings are nested too deep for functions that follow them, or hold too much, because one stands
            in itself or in many places; or a text is not Unicode.
    """
    within, seen = [iter([value])], 0
    while within:
        for each in within[-1]:
            seen += 1
            if isinstance(each, str) and not each.isascii():
                each.encode()
            if isinstance(each, dict | list | tuple):
                within.append(iter(each) if not isinstance(each, dict) else chain(each, each.values()))
                break
        else:
            within.pop()
        if len(within) > DEEPEST or seen > MOST:
            raise ValueError(f"it is nested more than {DEEPEST} levels deep, or holds more than {MOST} values")


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


def write_json(path: Path, value: Any) -> None:
    """Writes a file of JSON that is complete as soon as it can be seen. Raises an OSError if it cannot be written."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
