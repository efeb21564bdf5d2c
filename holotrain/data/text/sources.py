"""Where text comes from: the files of the standard library, or files that globs name."""

import glob
import re
import sysconfig
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from holotrain.data.text.readers import ROWS, Document, Reader
from holotrain.errors import UserError


@dataclass(frozen=True)
class SourceFile:
    """A file of a corpus.

    Attributes:
        path: of the file.
        name: its path below the corpus's root, with slashes, so that it is the same on every machine.
        group: its package or folder, which is its class if classes are folders.
        part: ``train``, ``val`` or ``test`` if the user chose it; None: it is chosen by a hash.
    """

    path: Path
    name: str
    group: str
    part: str | None = None


class Source(ABC):
    """Files, and the documents in them.

    Attributes:
        reader: reads the files.
        settings: everything besides the files that the documents depend on, in plain values.
    """

    reader: Reader

    @property
    def settings(self) -> dict:
        return {name: value for name, value in vars(self.reader).items() if name != "skipped"}

    @abstractmethod
    def files(self) -> list[SourceFile]:
        """The files, sorted by name.

        Raises:
            UserError: there is no file.
        """

    def documents(self, file: SourceFile) -> Iterator[Document]:
        """The documents of a file and their labels, one after another.

        Raises:
            UserError: as :meth:`Reader.documents` does.
        """
        yield from self.reader.documents(file.path)


class StandardLibrary(Source):
    """Python's own modules: the .py files of the running interpreter's standard library that are UTF-8.

    Args:
        unit: as in :class:`Reader`.
        classes: number of packages, those with the most files, that serve as labels; other documents have no label. Modules
            outside of a folder are not a package, nor is ``test``, which is about all the others. 0: no labels.
    """

    def __init__(self, unit: str = "file", classes: int = 0) -> None:
        self.reader = Reader(unit=unit, on_error="skip")
        self.classes = classes
        self.root = Path(sysconfig.get_path("stdlib"))

    @property
    def settings(self) -> dict:
        return super().settings | {"classes": self.classes}

    def files(self) -> list[SourceFile]:
        found = []
        for path in self.root.rglob("*.py"):
            parts = path.relative_to(self.root).parts
            if not {"site-packages", "dist-packages", "__pycache__"} & set(parts) and path.is_file():
                found.append(SourceFile(path, "/".join(parts), parts[0] if len(parts) > 1 else ""))
        if not found:
            raise UserError(f"data: this Python has no .py files in {self.root}; take data=text_files")
        self._labelled = set(self._largest(found))
        return sorted(found, key=lambda file: file.name)

    def documents(self, file: SourceFile) -> Iterator[Document]:
        label = file.group if file.group in self._labelled else None
        for text, _ in super().documents(file):
            yield text, label

    def _largest(self, files: Sequence[SourceFile]) -> list[str]:
        sizes = Counter(file.group for file in files if file.group not in ("", "test"))
        ranked = sorted(sizes, key=lambda group: (-sizes[group], group))
        if self.classes > len(ranked):
            raise UserError(f"data.classes: {self.classes} is out of range; the standard library has {len(ranked)} packages")
        return ranked[: self.classes]


class Globbed(Source):
    """Files that match patterns.

    Args:
        files: patterns; ``**`` stands for folders of any depth.
        val_files, test_files: patterns of the files for validation and test. If a file matches several patterns, test comes
            first, then validation, then training.
        reader: reads them.
        label: ``"folder"``: the name of a file's folder; a field or column that the reader returns; or None.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        val_files: str | Sequence[str] = (),
        test_files: str | Sequence[str] = (),
        reader: Reader | None = None,
        label: str | None = None,
    ) -> None:
        self.patterns = {"test_files": test_files, "val_files": val_files, "files": files}
        self.reader = reader or Reader()
        self.label = label

    @property
    def settings(self) -> dict:
        return super().settings | {"folder": self.label == "folder"}

    def files(self) -> list[SourceFile]:
        found: dict[Path, SourceFile] = {}
        for option, patterns in self.patterns.items():
            for pattern in [patterns] if isinstance(patterns, str) else patterns:
                for path, name in matches(option, pattern):
                    part = None if option == "files" else option.removesuffix("_files")
                    found.setdefault(path.resolve(), SourceFile(path, name, path.parent.name, part))
        if not found:
            raise UserError("data.files: no pattern is given; take data.files='[FOLDER/**/*.txt]'")
        return sorted(found.values(), key=lambda file: (file.name, str(file.path)))

    def documents(self, file: SourceFile) -> Iterator[Document]:
        for text, label in super().documents(file):
            yield text, file.group if self.label == "folder" else label


def matches(option: str, pattern: str) -> list[tuple[Path, str]]:
    """The files that match a pattern, with their names below the part of it that has no wildcard.

    Raises:
        UserError: there is no such file.
    """
    whole = Path(pattern).expanduser()
    if whole.is_dir():
        raise UserError(f"data.{option}: {pattern} is a folder; its files are {whole / '**' / '*.txt'}")
    fixed = whole.parts[:-1]
    wild = next((index for index, part in enumerate(fixed) if re.search(r"[*?[]", part)), len(fixed))
    root = Path(*fixed[:wild])
    paths = [Path(path) for path in glob.glob(str(whole), recursive=True)]
    files = sorted(path for path in paths if path.is_file())
    if not files:
        known = ", ".join((".txt", *ROWS))
        raise UserError(f"data.{option}: no file matches {pattern!r}; files may be {known} or any plain text")
    return [(path, path.relative_to(root).as_posix()) for path in files]
