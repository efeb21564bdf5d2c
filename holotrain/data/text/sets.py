"""Text of files, Python's standard library, and the Hugging Face Hub."""

import sysconfig
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from holotrain.data.hub import FromHub
from holotrain.data.text.module import TextDataModule
from holotrain.data.text.sources import TextFile, matches, readable, rows_of
from holotrain.data.text.tokenise import Rows
from holotrain.errors import UserError
from holotrain.numeric import counted, require_at_least, require_one_of


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

    def files(self) -> list[TextFile]:
        """The modules. Those outside of a folder have no label, nor have those of ``test``, which is about all the others."""
        root = Path(sysconfig.get_path("stdlib"))
        found = {}
        for path in root.rglob("*.py"):
            parts = path.relative_to(root).parts
            if not {"site-packages", "dist-packages", "__pycache__"} & set(parts) and path.is_file():
                found[path] = parts
        if not found:
            raise UserError(f"data: this Python has no .py files in {root}; take data=text_files")
        sizes = Counter(parts[0] for parts in found.values() if len(parts) > 1 and parts[0] != "test")
        packages = sorted(sizes, key=lambda package: (-sizes[package], package))
        if self.classes > len(packages):
            raise UserError(f"data.classes: {self.classes} is out of range; the standard library has {len(packages)} packages")
        labels = {package: package for package in packages[: self.classes]}
        return [TextFile(path, "/".join(parts), label=labels.get(parts[0])) for path, parts in found.items()]

    def rows(self) -> list[Rows]:
        files = readable(self.files(), self.cache)  # some modules are tests of other encodings
        return rows_of(files, self.reading(), self.cache, self.streaming, self.num_proc)


class TextFiles(TextDataModule):
    """Text files: plain ones, and files of rows: .jsonl (a JSON object a line), .parquet, .csv and .tsv.

    Args:
        files: glob of files or list of globs: plain text, .jsonl, .parquet, .csv or .tsv; ** matches folders of any depth
        val_files: the same for the validation set; []: use val_fraction
        test_files: the same for the test set; []: use test_fraction
        text: column of the text, in files of rows
        label: column of the class; folder: the name of a file's folder; null: no classes
        on_error: what to do with an unreadable file, or a row without text: error (end the run) or skip (leave it out)
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
        self.patterns = {"test_files": test_files, "val_files": val_files, "files": files}
        self.text_column, self.on_error = text, on_error
        self.label = label if self.labels else None

    def files(self) -> list[TextFile]:
        """The files that match. One that matches several patterns is for the test, else for validation, else for training."""
        found: dict[Path, TextFile] = {}
        for option, patterns in self.patterns.items():
            part = None if option == "files" else option.removesuffix("_files")
            for file in matches(option, patterns, part):
                found.setdefault(file.path.resolve(), file)
        if not found:
            raise UserError("data.files: no pattern is given; take data.files='[FOLDER/**/*.txt]'")
        if self.label == "folder":
            return [replace(file, label=file.path.parent.name) for file in found.values()]
        return list(found.values())

    def rows(self) -> list[Rows]:
        column, files = None if self.label == "folder" else self.label, self.files()
        if self.on_error == "skip" and (left_out := len(files) - len(files := readable(files, self.cache))):
            warnings.warn(f"data: left out {counted(left_out, 'file')} that cannot be read", stacklevel=2)
        reading = self.reading(text=self.text_column, label=column, skip=self.on_error == "skip")
        return rows_of(files, reading, self.cache, self.streaming, self.num_proc)


class HubText(FromHub, TextDataModule):
    """Text of a data set of the Hugging Face Hub, of a folder that ``save_to_disk`` of its datasets library wrote, or of files.

    Args:
        name: a folder that save_to_disk wrote, a file, a glob, a folder of files, or a name on the Hub
        text: column of the text
        label: column of the class; null: no classes
        on_error: what to do with a row without text or class: error (end the run) or skip (leave it out)
        options: those of :class:`~holotrain.data.hub.FromHub` and :class:`TextDataModule`

    Raises:
        ValueError: a value out of range.
    """

    def __init__(
        self,
        name: str,
        text: str = "text",
        label: str | None = None,
        on_error: Literal["error", "skip"] = "error",
        **options: Any,
    ) -> None:
        super().__init__(name, **options)
        require_one_of(("error", "skip"), on_error=on_error)
        self.text_column, self.on_error = text, on_error
        self.label = label if self.labels else None

    def rows(self) -> list[Rows]:
        shares = zip(("val", "test"), self.fractions, strict=True)
        reading = self.reading(text=self.text_column, label=self.label, skip=self.on_error == "skip")
        reading = replace(reading, fractions=tuple(0.0 if self.splits[part] else share for part, share in shares))
        found = self.opened(self.streaming)
        return [Rows(each, reading if part == "train" else replace(reading, part=part)) for part, each in found.items()]
