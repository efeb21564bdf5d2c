"""Files that are there whole or not at all."""

import os
from contextlib import suppress
from pathlib import Path

from holotrain.errors import UserError


def write_whole(path: Path, text: str) -> None:
    """Writes to a temporary name beside ``path`` and renames.

    Raises:
        UserError: the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):  # the folder may be none at all
            temporary.unlink()
        raise UserError(f"cannot write {path}: {error.strerror}") from error
