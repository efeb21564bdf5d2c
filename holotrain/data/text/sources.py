"""Where text comes from: files, Python's standard library, the Hugging Face Hub, and files to classify or score.

Which files match, which are held out, and the rows in them.
"""

import codecs
import glob
import re
import sysconfig
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from holotrain.data.hub import (
    FORMATS,
    FromHub,
    encoding_of,
    library_errors,
    read_files,
    require_uncompressed,
    separator_of,
)
from holotrain.data.loader import Loader
from holotrain.data.text.answers import AnswerRules
from holotrain.data.text.module import TextDataModule
from holotrain.data.text.tokenise import BETWEEN, Batch, DocumentRules, Rows, fraction_of
from holotrain.data.tokenizers import Tokenizer
from holotrain.errors import UserError
from holotrain.files import open_regular
from holotrain.numeric import counted, require_at_least, require_one_of

FEW = 20
"""With fewer files than this, documents are held out instead, if files hold several."""

LIST_OF_OBJECTS = re.compile(rb"\[\s{0,90}\{")
"""How a .json begins that holds rows."""

NAMED = 5
"""So many of the rows that are left out are named."""

SAMPLES = {"file": "document", "paragraph": "paragraph", "line": "line"}
"""What the library calls the units of plain text."""


@dataclass(frozen=True)
class TextFile:
    """A file of a corpus.

    Attributes:
        name: its path below the corpus's root, with slashes, so that it is the same on every machine.
        part: ``train``, ``val`` or ``test`` if the user chose it; None: it is chosen by a hash.
        label: the class of all its documents, if that is known of the file.
    """

    path: Path
    name: str
    part: str | None = None
    label: str | None = None


def kind_of(path: Path) -> str:
    """What the library calls the format of a file of rows, also of a .json that is a list of objects; else text."""
    if path.suffix.lower() != ".json":
        return FORMATS.get(path.suffix.lower(), "text")
    with open_regular(path) as file:
        return "json" if LIST_OF_OBJECTS.match(file.read(2**10).removeprefix(codecs.BOM_UTF8)) else "text"


def has_rows(path: Path) -> bool:
    """Whether a file of rows has any; of one that only a library can read it is not known."""
    least = {"json": 1, "csv": 2, "tsv": 2}.get(kind_of(path), 0)  # lines, the header among them
    with open_regular(path) as file:
        return not least or len([*islice((line for line in file if line.strip(b"\0\r\n\t ")), least)]) == least


def reading_of(path: Path, separator: str | None = None, encoding: str | None = None) -> tuple[str, tuple]:
    """The format of a file, and options of how it is read, of which those that are not given are found."""
    kind, options = kind_of(path), {}
    if kind in ("text", "csv", "tsv"):
        options["encoding"] = encoding or encoding_of(path)
    if kind in ("csv", "tsv"):
        options["sep"] = separator or separator_of(path, kind, encoding)
    return kind, tuple(options.items())


def matches(option: str, patterns: str | Sequence[str], part: str | None = None) -> list[TextFile]:
    """The files that match glob patterns, named below the part of the pattern that has no wildcard."""
    files = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        whole = Path(pattern).expanduser()
        if whole.is_dir():
            raise UserError(f"data.{option}: {pattern} is a folder; its files are {whole / '**' / '*.txt'}")
        if whole.is_file():  # its name may look like a pattern, such as a[1].txt
            files.append(TextFile(whole, whole.name, part))
            continue
        fixed = whole.parts[:-1]
        wild = next((index for index, name in enumerate(fixed) if re.search(r"[*?[]", name)), len(fixed))
        root, rest = Path(*whole.parts[:wild]), str(Path(*whole.parts[wild:]))
        names = [name for name in glob.glob(rest, root_dir=root, recursive=True) if (root / name).is_file()]
        if not names:
            suffixes = ", ".join((".txt", *FORMATS))
            raise UserError(f"data.{option}: no file matches {pattern!r}; files may be {suffixes} or any plain text")
        files += [TextFile(root / name, Path(name).as_posix(), part) for name in names]
    return files


def rows_of(
    files: Sequence[TextFile],
    rules: DocumentRules,
    cache: Path,
    streaming: bool = False,
    num_proc: int | None = None,
    **reading: str | None,
) -> list[Rows]:
    """Files, in groups of one part and label each. With enough files, whole ones are held out; else documents.

    ``streaming`` and ``num_proc`` are those of :func:`~holotrain.data.hub.read_files`, ``reading`` of :func:`reading_of`.
    """
    chosen = {file.part for file in files}
    with library_errors("a file"):
        files = with_rows(files)
        readings = {file.path: reading_of(file.path, **reading) for file in files}
    drawn = [file for file in files if file.part is None]
    shares = [0.0 if part in chosen else share for part, share in zip(("val", "test"), rules.fractions, strict=True)]
    if len(drawn) >= FEW or (rules.unit == "file" and all(readings[file.path][0] == "text" for file in drawn)):
        parts = held_out_files([file.name for file in drawn], *shares)
        files = [replace(file, part=file.part or parts[file.name]) for file in files]
    groups: dict[tuple, dict[tuple, list[Path]]] = defaultdict(lambda: defaultdict(list))
    for file in sorted(files, key=lambda file: (file.name, str(file.path))):
        groups[readings[file.path]][file.part, file.label].append(file.path)
    rows = []
    for (kind, found), members in groups.items():
        options = dict(found)
        if kind == "text":
            options |= {"sample_by": SAMPLES[rules.unit]} | ({"encoding_errors": "replace"} if rules.skip else {})
        names = {f"group_{number}": paths for number, paths in enumerate(members.values())}
        try:
            read = read_files(kind, names, cache, streaming, num_proc, **options)
        except UserError:
            for file in files:
                require_sound(file, cache, **reading)
            raise
        for dataset, ((part, label), paths) in zip(read.values(), members.items(), strict=True):
            others = f" and {counted(len(paths) - 1, f'other {paths[0].suffix} file')}" if len(paths) > 1 else ""
            source = f"{paths[0]}{others}"
            of_group = replace(rules, fractions=tuple(shares), part=part, file_label=label, source=source)
            rows.append(Rows.checked(dataset, of_group))
    return rows


def held_out_files(names: Sequence[str], val_fraction: float, test_fraction: float) -> dict[str, str]:
    """The part of each file: those whose names have the lowest hashes are for the test, the highest for validation.

    Adding a file moves at most one other. A fraction above 0 holds out at least one file.
    """
    order = sorted(names, key=fraction_of)
    test, val = (max(round(len(names) * share), 1) if share else 0 for share in (test_fraction, val_fraction))
    held = dict.fromkeys(order[len(names) - val :], "val") | dict.fromkeys(order[:test], "test")
    return dict.fromkeys(names, "train") | held


def with_rows(files: Sequence[TextFile]) -> list[TextFile]:
    """Without the files of rows that have none, which is said. Raises a UserError if no other is left."""
    found = [file for file in files if has_rows(file.path)]
    if empty := [str(file.path) for file in files if file not in found]:
        names = ", ".join(empty[:NAMED]) + f" and {len(empty) - NAMED} more" * (len(empty) > NAMED)
        if not found:
            raise UserError(f"data: there are no rows in {names}")
        warnings.warn(f"data: left out {counted(len(empty), 'file')} without rows: {names}", stacklevel=2)
    return found


def require_sound(file: TextFile, cache: Path, **reading: str | None) -> None:
    """Reads a file alone. Raises a UserError that names it if it cannot be read: of several, the library does not say which."""
    kind, options = reading_of(file.path, **reading)
    with library_errors(str(file.path)):
        rows: Any = read_files(kind, {"a": [file.path]}, cache, streaming=True, **dict(options))["a"]
        for _ in rows.with_format("arrow").iter(1000):
            pass


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
        every = {path: path.relative_to(root).parts for path in root.rglob("*.py") if path.is_file()}
        others = {"site-packages", "dist-packages", "__pycache__"}
        found = {path: parts for path, parts in every.items() if others.isdisjoint(parts)}
        if not found:
            raise UserError(f"data: this Python has no .py files in {root}; take data=text_files")
        sizes = Counter(parts[0] for parts in found.values() if len(parts) > 1 and parts[0] != "test")
        packages = sorted(sizes, key=lambda package: (-sizes[package], package))
        if self.classes > len(packages):
            raise UserError(f"data.classes: {self.classes} is out of range; the standard library has {len(packages)} packages")
        labels = {package: package for package in packages[: self.classes]}
        return [TextFile(path, "/".join(parts), label=labels.get(parts[0])) for path, parts in found.items()]

    def rows(self) -> list[Rows]:
        rules = self.rules(skip=True)  # some modules are tests of other encodings
        return rows_of(self.files(), rules, self.cache, self.streaming, self.num_proc)


class TextInColumns(TextDataModule):
    """Text of rows, some of which may be left out.

    Args:
        text: column of the text, in files of rows
        label: column of the class; folder (text_files): the name of a file's folder; null: no classes
        messages: column of chats, lists of {role, content}: each row is a sequence, and the assistant's messages alone are
            learned; for task=causal_lm; auto: the columns say it (messages, conversations, instruction and output, prompt and
            completion); null: that too, if there is no column of text
        train_on: all, or last: the last message of the assistant alone is learned, and those with a weight of 1
        show: rows that the first screen shows, with what is learned marked
        completion: column of what is to follow a prompt: each row is a sequence, and its completion alone is learned; for
            task=causal_lm
        prompt: column of the prompt, beside a completion
        on_error: what to do with a row without text or class: error (end the run) or skip (leave it out; in plain text, what is
            no UTF-8 becomes U+FFFD)
    """

    def __init__(
        self,
        text: str = "text",
        label: str | None = None,
        messages: str | None = None,
        completion: str | None = None,
        prompt: str = "prompt",
        train_on: Literal["all", "last"] = "all",
        show: int = 0,
        on_error: Literal["error", "skip"] = "error",
        **options: Any,
    ) -> None:
        self.answers: dict[str, Any] = {"messages": messages, "completion": completion, "prompt": prompt, "train_on": train_on}
        given = [name for name in ("messages", "completion") if self.answers[name]]
        if prompt != "prompt" and not completion:
            raise ValueError("prompt needs data.completion, the column of what follows a prompt")
        _check_answers(given, {"text": text != "text", "label": label, **options})
        super().__init__(**options)
        if given:
            self.layout = "answers"  # a row is a sequence
        require_one_of(("error", "skip"), on_error=on_error)
        require_one_of(("all", "last"), train_on=train_on)
        require_at_least(0, show=show)
        self.show = show
        self.text_column, self.skip = text, on_error == "skip"
        self.label = label if self.labels else None

    def rules(self, label: str | None = None, **options: Any) -> DocumentRules:
        found = super().rules(text=self.text_column, label=label, skip=self.skip, **options)
        undecided = self.layout == "packed" and self.text_column == "text" and not self.streaming and self.chosen_unit is None
        return AnswerRules(**vars(found) | self.answers) if undecided or self.layout == "answers" else found


def _check_answers(given: list[str], options: dict[str, Any]) -> None:
    if len(given) > 1:
        raise ValueError("messages cannot be combined with completion; rows have one of the two")
    if given and options.get("layout", "packed") != "packed":
        raise ValueError(f"{given[0]} needs task=causal_lm, which learns answers alone")
    for name in ("text", "label", "streaming", "unit"):
        if given and options.get(name):
            raise ValueError(f"{name} cannot be combined with {given[0]}: a row holds its texts, and is read whole")


class TextFiles(TextInColumns):
    """Text files: plain ones, and files of rows: .jsonl (a JSON object a line), .parquet, .csv and .tsv.

    Args:
        files: glob of files or list of globs: plain text, .jsonl, .parquet, .csv or .tsv; ** matches folders of any depth
        val_files: the same for the validation set; []: use val_fraction
        test_files: the same for the test set; []: use test_fraction
        separator: what separates the fields of .csv and .tsv, one character or tab; null: a comma (a tab), or what the first
            line has
        encoding: of plain text and .csv, such as latin-1; null: UTF-8, or UTF-16 and UTF-32 that say so in their first bytes
    """

    def __init__(
        self,
        files: str | Sequence[str],
        val_files: str | Sequence[str] = (),
        test_files: str | Sequence[str] = (),
        separator: str | None = None,
        encoding: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        separator = "\t" if separator == "tab" else separator
        if separator is not None and len(separator) != 1:
            raise ValueError(f"separator: must be one character, or tab, not {separator!r}")
        try:
            codecs.lookup(encoding or "utf-8")
        except LookupError:
            raise ValueError(f"encoding: there is none called {encoding!r}; try latin-1, cp1252 or utf-16") from None
        self.reading = {"separator": separator, "encoding": encoding}
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
        rules = self.rules(label=None if self.label == "folder" else self.label)
        return rows_of(self.files(), rules, self.cache, self.streaming, self.num_proc, **self.reading)


class HubText(FromHub, TextInColumns):
    """Text of a data set of the Hugging Face Hub, of a folder that ``save_to_disk`` (datasets) wrote, or of files."""

    def rows(self) -> list[Rows]:
        shares = zip(("val", "test"), self.fractions, strict=True)
        fractions = tuple(0.0 if self.splits[part] else share for part, share in shares)
        rules = self.rules(self.label, fractions=fractions, source=self.name)
        rows = []
        for part, each in self.opened(self.streaming).items():
            rows.append(Rows.checked(each, rules if part == "train" else replace(rules, part=part)))
        return rows


def texts_in(path: Path, text: str, unit: str, cache: Path) -> Iterator[tuple[str, str]]:
    """Name and text, which may be blank, of each row of a file, and of each ``unit`` of plain text."""
    kind = kind_of(path)
    if kind != "text" and not has_rows(path):
        return
    if kind != "text":
        rows = read_files(kind, {"a": [path]}, cache, streaming=True)["a"]
        DocumentRules(text=text, source=str(path)).checked(rows)
        for number, row in enumerate(rows.select_columns([text]), 1):
            yield f"{path}:{number}", row[text] or ""
        return
    require_uncompressed(path)
    content = path.read_text(encoding=encoding_of(path))
    if unit == "file":
        yield str(path), content
        return
    for number, piece in enumerate(BETWEEN[unit].split(content.lstrip("\n") if unit == "paragraph" else content), 1):
        yield f"{path}:{number}", piece


def texts_at(path: Path, text: str, unit: str = "file") -> list[tuple[str, str]]:
    """Name and text of each row that is not blank, and of each ``unit`` of plain text, in a file or folder."""
    if not path.exists():
        raise UserError(f"texts: there is no file or folder {path}")
    found, blank = [], []
    for each in [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file()):
        try:
            with TemporaryDirectory() as cache, library_errors(str(each)):  # the library keeps its locks there
                texts = [*texts_in(each, text, unit, Path(cache))]
        except UserError as error:
            raise UserError(f"texts: {str(error).removeprefix('data: ')}") from error
        found += [(name, written) for name, written in texts if written.strip()]
        if kind_of(each) != "text":
            blank += [name for name, written in texts if not written.strip()]
    if blank:
        names = ", ".join(blank[:NAMED]) + f" and {len(blank) - NAMED} more" * (len(blank) > NAMED)
        warnings.warn(f"data: left out {counted(len(blank), 'row')} without text: {names}", stacklevel=2)
    if not found:
        raise UserError(f"texts: there is no text in {path}")
    return found


def text_files(
    path: Path,
    tokenizer: Tokenizer,
    context: int,
    packed: bool,
    batch_size: int,
    text: str = "text",
    unit: str = "file",
    **loading: Any,
) -> Loader:
    """Text files, each a document, sorted by name: ``tokens`` (B, T), ``lengths`` (B,), ``names``.

    Args:
        path: a file or a folder; in files of rows each row is a document, named ``FILE:ROW``.
        context: tokens that the model sees.
        packed: all tokens of a text are targets, in blocks of at most ``context + 1`` that begin with an end token; False: a
            text is cut short between start and end token, as for classification.
        text: column that holds the text, in files of rows.
        unit: what a document of plain text is: a file, or a paragraph or line, named ``FILE:NUMBER``.
        loading: options of DataLoader, such as ``num_workers``.

    Raises:
        UserError: there is no text at ``path``, or it cannot be read.
    """
    end, rows = tokenizer.end_id, []
    for name, written in texts_at(path, text, unit):
        ids = tokenizer.encode(written)
        if packed:
            whole = np.concatenate([[end], ids, [end]])
            rows += [(name, whole[first : first + context + 1]) for first in range(0, len(whole) - 1, context)]
        else:
            rows.append((name, np.concatenate([[tokenizer.start_id], ids[: context - 2], [end]])))
    collate = partial(padded_rows, tokenizer.pad_id)
    return Loader(rows, batch_size, collate_fn=collate, **loading)  # ty: ignore[invalid-argument-type]: a list is one


def padded_rows(pad_id: int, rows: Sequence[tuple[str, np.ndarray]]) -> Batch:
    """Names and token ids, padded to the longest: ``tokens`` (B, T), ``lengths`` (B,), ``names`` a list of B."""
    tokens = pad_sequence([torch.from_numpy(ids) for _, ids in rows], batch_first=True, padding_value=pad_id)
    return {"tokens": tokens, "lengths": torch.tensor([len(ids) for _, ids in rows]), "names": [name for name, _ in rows]}
