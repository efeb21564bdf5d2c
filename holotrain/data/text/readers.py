"""Reads documents from files one after another: plain text, .jsonl, .parquet. Large files are read in pieces."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holotrain.checks import did_you_mean
from holotrain.errors import UserError

UNITS = ("file", "paragraph", "line")
ROWS = (".jsonl", ".ndjson", ".parquet")
"""Extensions of files that hold many texts."""

BLOCK = 2**24
"""Bytes of a plain text file that are decoded at once."""

BLANK = re.compile(r"\n(?:[ \t\r\f\v]*\n)+")
"""What separates paragraphs."""

Document = tuple[str, str | None]
"""A text and its label, or None."""


@dataclass
class Reader:
    """Reads documents from files; the extension says how.

    Args:
        unit: what a document is: a ``file`` (a row, in files of rows), a ``paragraph`` between blank lines, or a ``line``.
        text: field or column that holds the text, in files of rows.
        label: field or column that holds the label; None: there is none.
        on_error: ``"error"`` raises a UserError for what cannot be read; ``"skip"`` leaves it out (a whole text file, or a row
            of .jsonl) and counts it in ``skipped``.
    """

    unit: str = "file"
    text: str = "text"
    label: str | None = None
    on_error: str = "error"
    skipped: int = field(default=0, init=False)

    def documents(self, path: Path) -> Iterator[Document]:
        """The documents of a file that are not blank.

        Raises:
            UserError: the file cannot be read or is not UTF-8, a line is not JSON, a field or column is missing, or pyarrow,
                which reads .parquet, is not installed.
        """
        try:
            for text, label in self._texts(path):
                for part in self._parts(text):
                    if part and not part.isspace():
                        yield part, label
        except NotUTF8 as error:
            self._bad(f"{path} is not UTF-8: byte {error.place} is 0x{error.byte:02x}")
        except OSError as error:
            self._bad(f"cannot read {path} ({error.strerror or error})")

    def _texts(self, path: Path) -> Iterator[tuple[str | Iterable[str], str | None]]:
        """The texts of a file with their labels; plain text comes in blocks."""
        if path.suffix in (".jsonl", ".ndjson"):
            yield from self._json_lines(path)
        elif path.suffix == ".parquet":
            yield from self._parquet(path)
        else:
            if self.on_error == "skip":
                for _ in decoded(path):  # read twice, because the whole file is left out
                    pass
            yield decoded(path), None

    def _parts(self, text: str | Iterable[str]) -> Iterator[str]:
        blocks = [text] if isinstance(text, str) else text
        if self.unit == "file":
            yield "".join(blocks)
            return
        rest = ""
        for block in blocks:
            whole = rest + block
            *parts, rest = BLANK.split(whole) if self.unit == "paragraph" else whole.split("\n")
            yield from (part.strip("\r\n") for part in parts)
        yield rest.strip("\r\n")

    def _json_lines(self, path: Path) -> Iterator[Document]:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.isspace():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:  # UnicodeDecodeError is one
                    self._bad(f"{path}:{number} is not JSON ({error})")
                    continue
                if not isinstance(row, dict):
                    self._bad(f"{path}:{number} is not a JSON object")
                    continue
                missing = next((name for name in self._fields() if name not in row), None)
                if missing is None:
                    yield from self._row(row, f"{path}:{number}: field")
                else:
                    there = f"it has {', '.join(row) or 'none'}.{did_you_mean(missing, row)}"
                    self._bad(f"{path}:{number} has no field {missing!r}; {there}")

    def _parquet(self, path: Path) -> Iterator[Document]:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise UserError(f"data: {path} needs pyarrow; pip install 'holotrain[parquet]'") from error
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                names = file.schema_arrow.names
                for name in self._fields():
                    if name not in names:
                        raise UserError(
                            f"data: {path} has no column {name!r}; it has {', '.join(names)}.{did_you_mean(name, names)}"
                        )
                for batch in file.iter_batches(batch_size=1024, columns=self._fields()):
                    for row in batch.to_pylist():
                        yield from self._row(row, f"{path}: column")
        except pyarrow.ArrowException as error:
            self._bad(f"cannot read {path} ({str(error).splitlines()[0]})")

    def _fields(self) -> list[str]:
        return [self.text] if self.label is None else [self.text, self.label]

    def _row(self, row: dict[str, Any], place: str) -> Iterator[Document]:
        label = None if self.label is None else row[self.label]
        if not isinstance(row[self.text], str):
            self._bad(f"{place} {self.text!r} is not text: {row[self.text]!r:.40}")
        elif self.label is not None and not isinstance(label, str | int):
            self._bad(f"{place} {self.label!r} is not a label: {label!r:.40}")
        else:
            yield row[self.text], None if label is None else str(label)

    def _bad(self, what: str) -> None:
        if self.on_error == "error":
            raise UserError(f"data: {what}; data.on_error=skip leaves it out")
        self.skipped += 1


class NotUTF8(Exception):
    """A byte at some place in a file is not valid UTF-8."""

    def __init__(self, place: int, byte: int) -> None:
        super().__init__(place, byte)
        self.place, self.byte = place, byte


def decoded(path: Path) -> Iterator[str]:
    """A text file in blocks of whole lines.

    Raises:
        NotUTF8: it is not UTF-8.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        place, rest = 0, b""
        while chunk := file.read(BLOCK):
            block = rest + chunk
            end = block.rfind(b"\n") + 1
            if end:
                yield _text(block[:end], place)
            place, rest = place + end, block[end:]
        if rest:
            yield _text(rest, place)


def _text(block: bytes, place: int) -> str:
    try:
        text = block.decode()
    except UnicodeDecodeError as error:
        raise NotUTF8(place + error.start, block[error.start]) from error
    return text.removeprefix("\ufeff") if place == 0 else text
