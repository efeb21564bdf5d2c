"""Atomic file writes."""

import os
from contextlib import suppress
from pathlib import Path

from holotrain.errors import UserError


def write_whole(path: Path, text: str) -> None:
    """Writes a temporary file next to ``path`` and renames it.

    Raises:
        UserError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):  # the folder may not exist
            temporary.unlink()
        raise UserError(f"cannot write {path}: {error.strerror}") from error
