"""Text of files, Python's standard library, and the Hugging Face Hub."""

import sysconfig
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from holotrain.data import hub
from holotrain.data.hub import FromHub, rows_without, warn_of_left_out
from holotrain.data.limits import Expanding
from holotrain.data.text.module import TextDataModule
from holotrain.data.text.sources import TextFile, matches, rows_of, searched
from holotrain.data.text.tokenise import Reading, Rows
from holotrain.errors import UserError
from holotrain.numeric import require_at_least, require_one_of

WITHOUT = "without text or class"


class StdlibText(TextDataModule):
    """Source code of the running Python's standard library: 30 MB of text that every machine has.

    Args:
        classes: number of classes, the packages with the most files; documents of others have no label
    """

    def __init__(self, classes: int = 8, **options: Any) -> None:
        super().__init__(**options)
        require_at_least(2, classes=classes)
        self.classes = classes if self.labels else 0

    def files(self) -> list[TextFile]:
        """The modules. Those outside of a folder have no label, nor have those of ``test``, which is about all the others."""
        root = Path(sysconfig.get_path("stdlib"))
        there = {path: path.relative_to(root).parts for path in root.rglob("*.py") if path.is_file()}
        others = {"site-packages", "dist-packages", "__pycache__"}
        found = {path: parts for path, parts in there.items() if others.isdisjoint(parts)}
        if not found:
            raise UserError(f"data: this Python has no .py files in {root}; take data=text_files")
        sizes = Counter(parts[0] for parts in found.values() if len(parts) > 1 and parts[0] != "test")
        packages = sorted(sizes, key=lambda package: (-sizes[package], package))
        if self.classes > len(packages):
            raise UserError(f"data.classes: {self.classes} is out of range; the standard library has {len(packages)} packages")
        labels = {package: package for package in packages[: self.classes]}
        return [TextFile(path, "/".join(parts), label=labels.get(parts[0])) for path, parts in found.items()]

    def rows(self) -> list[Rows]:
        found = searched(self.files(), self.cache)
        files = [file for file, empty in found.items() if empty is not None]  # some modules are tests of other encodings
        return rows_of(files, self.reading(), self.cache, self.streaming, self.num_proc)


class TextInColumns(TextDataModule):
    """Text of rows, some of which may be left out.

    Args:
        text: column of the text, in files of rows
        label: column of the class; folder (text_files): the name of a file's folder; null: no classes
        on_error: what to do with an unreadable file, or a row without text or class: error (end the run) or skip (leave it out)
    """

    def __init__(
        self, text: str = "text", label: str | None = None, on_error: Literal["error", "skip"] = "error", **options: Any
    ) -> None:
        super().__init__(**options)
        require_one_of(("error", "skip"), on_error=on_error)
        self.text_column, self.skip = text, on_error == "skip"
        self.label = label if self.labels else None

    def columns(self, label: str | None) -> list[str]:
        """Those in which a row must have something."""
        return [self.text_column, *([label] if label else [])]

    def reading(self, label: str | None = None, **options: Any) -> Reading:
        return super().reading(text=self.text_column, label=label, skip=self.skip, **options)


class TextFiles(Expanding, TextInColumns):
    """Text files: plain ones, and files of rows: .jsonl (a JSON object a line), .parquet, .csv and .tsv.

    Args:
        files: glob of files or list of globs: plain text, .jsonl, .parquet, .csv or .tsv; ** matches folders of any depth
        val_files: the same for the validation set; []: use val_fraction
        test_files: the same for the test set; []: use test_fraction
    """

    def __init__(
        self,
        files: str | Sequence[str],
        val_files: str | Sequence[str] = (),
        test_files: str | Sequence[str] = (),
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.patterns = {"test_files": test_files, "val_files": val_files, "files": files}

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
        label, files = None if self.label == "folder" else self.label, self.files()
        if self.skip:
            found = searched(files, self.cache, self.columns(label), self.expansion)
            files = [file for file, empty in found.items() if empty is not None]
            named = sorted((str(file.path), empty) for file, empty in found.items())
            warn_of_left_out("file", "that cannot be read", [name for name, empty in named if empty is None])
            warn_of_left_out("row", WITHOUT, [f"{name}:{row}" for name, empty in named for row in empty or []])
        return rows_of(files, self.reading(label=label), self.cache, self.streaming, self.num_proc, self.expansion)


class HubText(FromHub, TextInColumns):
    """Text of a data set of the Hugging Face Hub, of a folder that ``save_to_disk`` (datasets) wrote, or of files."""

    def rows(self) -> list[Rows]:
        shares = zip(("val", "test"), self.fractions, strict=True)
        reading = self.reading(self.label, fractions=tuple(0.0 if self.splits[part] else share for part, share in shares))
        found = self.opened(self.streaming)
        if self.skip and not self.streaming:
            with hub.reading("the text"):
                empty = {self.splits[part]: rows_without(each, self.columns(self.label)) for part, each in found.items()}
            names = [f"{self.name}:{split}:{row}" for split, rows in empty.items() for row in rows]
            warn_of_left_out("row", WITHOUT, names)
        return [Rows(each, reading if part == "train" else replace(reading, part=part)) for part, each in found.items()]
