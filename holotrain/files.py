"""Files: written so that they are complete whenever they can be seen, and read as data that anybody may have written."""

import errno
import json
import os
import secrets
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

DEEPEST = 100
"""Levels of lists and mappings in each other."""

LARGEST = 2**26
"""Bytes of a file of text or of JSON."""


def open_regular(path: str | Path) -> BinaryIO:
    """Opens a regular file to read its bytes. A pipe would wait for a writer, and a device may never end.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return open(path, "rb")


def read_bytes(path: str | Path, most: int = LARGEST) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: it cannot be read, or is no regular file.
        ValueError: it has more than ``most`` bytes.
    """
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most} bytes")
    return content


def read_text(path: str | Path, most: int = LARGEST) -> str:
    """The content of a regular file of text in UTF-8, with or without a byte order mark. Raises what :func:`read_bytes` does,
    and a ValueError if it is no UTF-8."""
    return read_bytes(path, most).decode("utf-8-sig")


def read_json(path: str | Path) -> Any:
    """The content of a file of JSON.

    Raises:
        OSError: it cannot be read, or is no regular file.
        ValueError: it is no JSON, or no JSON of ours: too large, nested too deep, or with text that is not Unicode.
    """
    return from_json(read_bytes(path))


def from_json(text: str | bytes) -> Any:
    """The content of a text of JSON. Raises a ValueError as :func:`read_json` does."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep") from error
    require_shallow(value)
    return value


def require_shallow(value: Any, levels: int = DEEPEST) -> None:
    """
    Raises:
        ValueError: lists and mappings are nested too deep for functions that follow them, or a text is not Unicode.
    """
    if not levels:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep")
    if isinstance(value, str):
        value.encode()
    if isinstance(value, dict | list | tuple):
        for each in chain(value, value.values()) if isinstance(value, dict) else value:
            require_shallow(each, levels - 1)


def is_inside(folder: Path, path: Path) -> bool:
    """Whether a regular file is at the path, or where a link there leads, and in the folder.

    In the cache of Hugging Face, the files of ``snapshots/<revision>`` are links into ``blobs``, which count as inside.
    """
    root, file = folder.resolve(), path.resolve()
    snapshot = next((each for each in (root, *root.parents) if each.parent.name == "snapshots"), None)
    in_cache = snapshot is not None and file.parent == snapshot.parent.parent / "blobs"
    return path.is_file() and (file.is_relative_to(root) or in_cache)


def require_inside(folder: Path, path: Path) -> None:
    """
    Raises:
        ValueError: what is at the path is not inside, see :func:`is_inside`.
    """
    if not is_inside(folder, path):
        raise ValueError(f"{path} is no file in {folder}")


@contextmanager
def replacing(path: Path, alone: bool = False) -> Generator[Path]:
    """Yields an empty file beside ``path`` to write to. It is renamed to ``path`` at the end, or removed after an error.

    Args:
        alone: no other process writes to ``path`` meanwhile; the file that a killed one has left is replaced.
    """
    temporary = path.with_name(f".{path.name}.{'new' if alone else secrets.token_hex(8)}")
    if alone:
        temporary.unlink(missing_ok=True)
    temporary.touch(exist_ok=False)  # nothing is written through a link that somebody has put there
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):  # the folder may not exist any more
            temporary.unlink()
        raise


def write_json(path: Path, value: Any) -> None:
    """Writes a file of JSON that is complete as soon as it can be seen. Raises an OSError if it cannot be written."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
