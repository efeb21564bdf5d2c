"""The text data sets: Python's standard library, and a user's own files."""

from collections.abc import Sequence
from typing import Any

from holotrain.checks import at_least, one_of
from holotrain.data.text.module import TextDataModule
from holotrain.data.text.readers import Reader
from holotrain.data.text.sources import Globbed, Source, StandardLibrary


class StdlibText(TextDataModule):
    """Source code of the running Python's standard library: 30 MB of text that every machine has.

    Args:
        classes: number of packages, those with the most files, that serve as labels. With the layout ``documents``, other
            documents are left out. 0: no labels, and all documents.
        options: those of :class:`TextDataModule`.
    """

    def __init__(self, classes: int = 0, **options: Any) -> None:
        super().__init__(**options)
        at_least("data.classes", classes, 0)
        self.classes = classes

    def source(self) -> Source:
        return StandardLibrary(self.unit, self.classes)


class TextFiles(TextDataModule):
    """Text files: plain ones, .jsonl (a JSON object a line) and .parquet.

    Args:
        files: patterns of files; ``**`` stands for folders of any depth.
        val_files, test_files: patterns of the files for validation and test, which are not trained on; without a pattern, the
            part is held out from ``files``.
        text: field or column that holds the text, in .jsonl and .parquet.
        label: field or column that holds the class; ``"folder"``: the name of a file's folder; None: no labels.
        on_error: ``"error"`` stops with one line about what cannot be read; ``"skip"`` leaves it out and counts it in the
            cache's manifest.
        options: those of :class:`TextDataModule`.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        val_files: str | Sequence[str] = (),
        test_files: str | Sequence[str] = (),
        text: str = "text",
        label: str | None = None,
        on_error: str = "error",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        one_of("data.on_error", on_error, ("error", "skip"))
        self.patterns = (files, val_files, test_files)
        self.text_field, self.label, self.on_error = text, label, on_error

    def source(self) -> Source:
        field = None if self.label == "folder" else self.label
        return Globbed(*self.patterns, Reader(self.unit, self.text_field, field, self.on_error), self.label)
