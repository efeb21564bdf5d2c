"""The text data sets: Python's standard library, and a user's own files."""

from collections.abc import Sequence
from typing import Any, Literal

from holotrain.data.text.module import TextDataModule
from holotrain.data.text.readers import Reader
from holotrain.data.text.sources import Globbed, Source, StandardLibrary
from holotrain.ranges import require_at_least, require_one_of


class StdlibText(TextDataModule):
    """Source code of the running Python's standard library: 30 MB of text that every machine has.

    Args:
        classes: number of classes, the packages with the most files; documents of others have no label
        options: those of :class:`TextDataModule`

    Raises:
        ValueError: a value out of range.
    """

    def __init__(self, classes: int = 8, **options: Any) -> None:
        super().__init__(**options)
        require_at_least(2, classes=classes)
        self.classes = classes if self.labels else 0

    def source(self) -> Source:
        return StandardLibrary(self.unit, self.classes)


class TextFiles(TextDataModule):
    """Text files: plain ones, .jsonl (a JSON object a line) and .parquet.

    Args:
        files: glob of files or list of globs: plain text, .jsonl or .parquet; ** matches folders of any depth
        val_files: the same for the validation set; []: use val_fraction
        test_files: the same for the test set; []: use test_fraction
        text: field (.jsonl) or column (.parquet) of the text
        label: field or column of the class; folder: the name of a file's folder; null: no classes
        on_error: what to do with an unreadable file or row: error (end the run) or skip (count it and leave it out)
        options: those of :class:`TextDataModule`

    Raises:
        ValueError: a value out of range.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        val_files: str | Sequence[str] = (),
        test_files: str | Sequence[str] = (),
        text: str = "text",
        label: str | None = None,
        on_error: Literal["error", "skip"] = "error",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        require_one_of(("error", "skip"), on_error=on_error)
        self.patterns = (files, val_files, test_files)
        self.text_field, self.on_error = text, on_error
        self.label = label if self.labels else None

    @property
    def usual_unit(self) -> Literal["file", "paragraph"]:
        return "file" if self.label else super().usual_unit  # a labelled file or row is one document

    def source(self) -> Source:
        field = None if self.label == "folder" else self.label
        return Globbed(*self.patterns, Reader(self.unit, self.text_field, field, self.on_error), self.label)
