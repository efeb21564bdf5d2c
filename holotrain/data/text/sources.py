"""Text files: which ones match, which are held out, how they are read, and those that a user names to classify or score."""

import glob
import json
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from holotrain.data import hub
from holotrain.data.hub import KINDS, files_read, fingerprint_of, rows_without
from holotrain.data.limits import EXPANSION
from holotrain.data.loader import Loader
from holotrain.data.text.tokenise import Batch, Reading, Rows, as_it_is, fraction_of
from holotrain.data.tokenizers import Tokenizer
from holotrain.errors import UserError
from holotrain.files import read_json, replacing
from holotrain.numeric import counted

FEW = 20
"""With fewer files than this, documents are held out instead, if files hold several."""

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

    @property
    def kind(self) -> str:
        return KINDS.get(self.path.suffix, "text")


def matches(option: str, patterns: str | Sequence[str], part: str | None = None) -> list[TextFile]:
    """The files that match glob patterns, named below the part of the pattern that has no wildcard.

    Raises:
        UserError: no file matches a pattern.
    """
    found = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        whole = Path(pattern).expanduser()
        if whole.is_dir():
            raise UserError(f"data.{option}: {pattern} is a folder; its files are {whole / '**' / '*.txt'}")
        fixed = whole.parts[:-1]
        wild = next((index for index, name in enumerate(fixed) if re.search(r"[*?[]", name)), len(fixed))
        root, rest = Path(*whole.parts[:wild]), str(Path(*whole.parts[wild:]))
        names = [name for name in glob.glob(rest, root_dir=root, recursive=True) if (root / name).is_file()]
        if not names:
            known = ", ".join((".txt", *KINDS))
            raise UserError(f"data.{option}: no file matches {pattern!r}; files may be {known} or any plain text")
        found += [TextFile(root / name, Path(name).as_posix(), part) for name in names]
    return found


def rows_of(
    files: Sequence[TextFile],
    reading: Reading,
    cache: Path,
    streaming: bool = False,
    num_proc: int | None = None,
    expansion: float = EXPANSION,
) -> list[Rows]:
    """Files, in groups of one part and label each. With enough files, whole ones are held out; else documents.

    Args:
        streaming, num_proc, expansion: see :func:`~holotrain.data.hub.files_read`.

    Raises:
        UserError: one cannot be read.
    """
    given = {file.part for file in files}
    drawn = [file for file in files if file.part is None]
    shares = [0.0 if part in given else share for part, share in zip(("val", "test"), reading.fractions, strict=True)]
    if len(drawn) >= FEW or (reading.unit == "file" and all(file.kind == "text" for file in drawn)):
        parts = held_out_files([file.name for file in drawn], *shares)
        files = [replace(file, part=file.part or parts[file.name]) for file in files]
    groups: dict[str, dict[tuple, list[Path]]] = defaultdict(lambda: defaultdict(list))
    for file in sorted(files, key=lambda file: (file.name, str(file.path))):
        groups[file.kind][file.part, file.label].append(file.path)
    rows = []
    for kind, members in groups.items():
        options = {"sample_by": SAMPLES[reading.unit], "encoding": "utf-8-sig"} if kind == "text" else {}
        names = {f"group_{number}": paths for number, paths in enumerate(members.values())}
        try:
            read = files_read(kind, names, cache, streaming, num_proc, expansion, **options)
        except UserError:
            for error in (_search(file, cache, expansion=expansion) for file in files):
                if isinstance(error, UserError):
                    raise UserError(f"{error}; data.on_error=skip leaves it out") from None
            raise
        for dataset, ((part, label), paths) in zip(read.values(), members.items(), strict=True):
            others = f" and {counted(len(paths) - 1, f'other {paths[0].suffix} file')}" if len(paths) > 1 else ""
            of_group = replace(reading, fractions=tuple(shares), part=part, given=label)
            rows.append(Rows(dataset, of_group, f"the rows of {paths[0]}{others}"))
    return rows


def held_out_files(names: Sequence[str], val_fraction: float, test_fraction: float) -> dict[str, str]:
    """The part of each file: those whose names have the lowest hashes are for the test, the highest for validation.

    Adding a file moves at most one other. A fraction above 0 holds out at least one file.
    """
    order = sorted(names, key=fraction_of)
    test, val = (max(round(len(names) * share), 1) if share else 0 for share in (test_fraction, val_fraction))
    held = dict.fromkeys(order[len(names) - val :], "val") | dict.fromkeys(order[:test], "test")
    return dict.fromkeys(names, "train") | held


def searched(
    files: Sequence[TextFile], cache: Path, columns: Sequence[str] = (), expansion: float = EXPANSION
) -> dict[TextFile, list[int] | None]:
    """The rows of each file that have nothing in one of the columns; None: the file cannot be read.

    Each file is read once for it: what is found is kept in ``cache`` until a file changes.
    """
    there = [file for file in files if os.access(file.path, os.R_OK)]
    known = cache / f"damaged-{fingerprint_of((file.path for file in there), str(expansion), *columns)}.json"
    try:
        kept = [None if rows is None else [int(row) for row in rows] for rows in read_json(known)]
        return dict.fromkeys(files) | dict(zip(there, kept, strict=True))
    except (OSError, ValueError, TypeError, OverflowError):  # not there, or no list of rows for each file
        found = {file: _search(file, cache, columns, expansion) for file in there}
    rows = {file: None if isinstance(each, UserError) else each for file, each in found.items()}
    if not any(isinstance(each, UserError) and isinstance(each.__cause__, OSError) for each in found.values()):  # may pass
        with hub.writing(cache), replacing(known) as temporary:
            temporary.write_text(json.dumps([*rows.values()]))
    return dict.fromkeys(files) | rows


def _search(file: TextFile, cache: Path, columns: Sequence[str] = (), expansion: float = EXPANSION) -> list[int] | UserError:
    """The rows that have nothing in one of the columns, or why the file cannot be read."""
    try:
        with hub.reading(str(file.path)):
            if file.kind != "text":
                return rows_without(files_read(file.kind, {"a": [file.path]}, cache, True, expansion=expansion)["a"], columns)
            hub.require_uncompressed(file.path)
            with file.path.open(encoding="utf-8-sig") as text:
                while text.read(2**24):
                    pass
    except UserError as error:
        return error
    return []


class LooseFiles(Dataset):
    """Rows of token ids, padded to the longest of their batch: ``tokens`` (B, T), ``lengths`` (B,), ``names`` a list of B."""

    def __init__(self, rows: Sequence[np.ndarray], names: Sequence[str], pad_id: int) -> None:
        self.rows, self.paths, self.pad_id = rows, list(names), pad_id

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, keys: Sequence[int]) -> Batch:
        rows = [torch.from_numpy(self.rows[key]) for key in keys]
        tokens = pad_sequence(rows, batch_first=True, padding_value=self.pad_id)
        return {"tokens": tokens, "lengths": torch.tensor([*map(len, rows)]), "names": [self.paths[key] for key in keys]}


def texts_at(path: Path, text: str, expansion: float = EXPANSION) -> list[tuple[str, str]]:
    """Name and text of the file at a path, or of all files below it; for files of rows, of each row that is not blank."""
    if not path.exists():
        raise UserError(f"texts: there is no file or folder {path}")
    found = []
    for each in [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file()):
        try:
            with TemporaryDirectory() as cache:  # the library keeps its locks there
                file = TextFile(each, each.name, "test")
                (rows,) = rows_of([file], Reading(text=text), Path(cache), streaming=True, expansion=expansion)
                numbered = [(number, one) for number, row in enumerate(rows.batches("test", 1), 1) for one in row]
        except UserError as error:  # whose advice is for data
            raise UserError(f"texts: {str(error).removeprefix('data: ').partition('; data.on_error')[0]}") from error
        found += [(f"{each}:{number}" if each.suffix in KINDS else str(each), one) for number, one in numbered]
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
    expansion: float = EXPANSION,
    **loading: Any,
) -> Loader:
    """Text files, each a document, sorted by name: ``tokens`` (B, T), ``lengths`` (B,), ``names``.

    Args:
        path: a file or a folder; in files of rows each row is a document, named ``FILE:ROW``.
        context: tokens that the model sees.
        packed: all tokens of a text are targets, in blocks of at most ``context + 1`` that begin with an end token; False: a
            text is cut short between start and end token, as for classification.
        text: column that holds the text, in files of rows.
        expansion: see :func:`~holotrain.data.hub.files_read`.
        loading: options of DataLoader, such as ``num_workers``.

    Raises:
        UserError: there is no text at ``path``, or it cannot be read.
    """
    end, rows, names = tokenizer.end_id, [], []
    for name, written in texts_at(path, text, expansion):
        ids = tokenizer.encode(written)
        if packed:
            whole = np.concatenate([[end], ids, [end]])
            cuts = [whole[first : first + context + 1] for first in range(0, len(whole) - 1, context)]
        else:
            cuts = [np.concatenate([[tokenizer.start_id], ids[: context - 2], [end]])]
        rows += cuts
        names += [name] * len(cuts)
    return Loader(LooseFiles(rows, names, tokenizer.pad_id), batch_size, collate_fn=as_it_is, **loading)
