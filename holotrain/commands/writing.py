"""Writes files so that none is ever half written."""

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from holotrain.errors import UserError
from holotrain.files import replacing


def write_table(path: Path, columns: Sequence[object], rows: Iterable[Sequence[object]]) -> None:
    """Writes a CSV file. Text that a spreadsheet would take for a formula is written after an apostrophe, as one would type it.
    Raises a UserError if the file cannot be written."""
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
    """Writes a file that is complete as soon as it can be seen. Raises a UserError if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8", errors="backslashreplace")  # file names need not be valid UTF-8
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
