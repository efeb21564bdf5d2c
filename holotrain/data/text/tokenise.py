"""From rows of a data set to documents and their tokens, which the datasets library keeps in memory-mapped Arrow files."""

import hashlib
import re
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from holotrain.data.hub import class_names, column, library_errors
from holotrain.data.tokenizers import Tokenizer, utf8
from holotrain.errors import UserError
from holotrain.numeric import counted

PARTS = ("train", "val", "test")

Batch = dict[str, Any]
"""``tokens`` (B, T) int64, and the other entries of the layout. Data sets of text gather one in ``__getitems__``."""


@dataclass(frozen=True)
class OnCPU:
    """A tensor of a batch, ``(B, ...)``, in a shell that DDP does not move, and in which Lightning finds the batch size."""

    tensor: Tensor


FORMAT = 3
"""Version of the tokens' files. Increase it whenever the same settings would write something else."""

BATCH = 256
"""Rows that are tokenised at once; a row may be a whole file."""

BETWEEN = {"paragraph": re.compile(r"\n(?:[ \t\r\f\v]*\n)+"), "line": re.compile(r"\r?\n")}
"""What separates the documents of a row."""


Row = Mapping[str, Any]


@dataclass(frozen=True)
class DocumentRules:
    """How rows become documents.

    Attributes:
        unit: what a document is: a ``file`` or row, a ``paragraph`` between blank lines, or a ``line``.
        text, label: columns; ``label`` may be None.
        skip: leave out rows that no document can be made of.
        fractions: of validation and test, for documents whose part is drawn.
        part: that all documents belong to; None: it is drawn for each.
        file_label: label of all documents; None: that of the column, or none.
        names: of the classes, if the column holds numbers of them.
        source: what messages call the data.
    """

    unit: str = "file"
    text: str = "text"
    label: str | None = None
    skip: bool = False
    fractions: tuple[float, float] = (0.0, 0.0)
    part: str | None = None
    file_label: str | None = None
    names: Sequence[str] | None = None
    source: str = "the data"

    @property
    def columns(self) -> list[str]:
        """Those that are read."""
        return [self.text, self.label] if self.label else [self.text]

    def checked(self, dataset: Any) -> "DocumentRules":
        """The rules, with the names of the classes, if the data have these columns and of these types."""
        from datasets import Value

        kind = column(dataset, "data.text", self.text, self.source)
        if not (isinstance(kind, Value) and "string" in kind.dtype):
            raise UserError(f"data.text: column {self.text!r} holds no text, but {kind}")
        return replace(self, names=class_names(dataset, self.label, self.source)) if self.label else self

    def refusal(self, row: Row) -> str:
        """What is wrong with a row that no document can be made of; else empty."""
        missing = [name for name in self.columns if row[name] is None]
        if missing:
            return f"has nothing in {missing[0]!r}"
        ignored = self.label and self.names is None and str(row[self.label]).strip() == "-100"
        return f"has the label -100 in {self.label!r}, which stands for none" if ignored else ""

    def is_usable(self, row: Row) -> bool:
        """Whether a document can be made of a row."""
        return not self.refusal(row)

    def rows(self, batch: Mapping[str, Sequence[Any]], first: int) -> Iterator[tuple[int, Row]]:
        """The rows of a batch, each with its number, counted from 1; ``first`` is the place of the first one in the data.

        Raises:
            UserError: no document can be made of one.
        """
        for number, values in enumerate(zip(*(batch[name] for name in self.columns), strict=True), first + 1):
            row = dict(zip(self.columns, values, strict=True))
            if reason := self.refusal(row):
                raise UserError(f"data: row {number} of {self.source} {reason}; data.on_error=skip leaves such rows out")
            yield number, row

    def documents(self, batch: Mapping[str, Sequence[Any]], part: str, first: int = 0) -> Iterator[tuple[str, str | None]]:
        """The documents of a part in rows that are not blank, each with its label or None. ``first``: see :meth:`rows`."""
        for _, row in self.rows(batch, first):
            text: str = row[self.text]
            label: Any = row[self.label] if self.label else self.file_label
            if self.names is not None:
                label = self.names[label] if label >= 0 else None
            for document in [text] if self.unit == "file" else BETWEEN[self.unit].split(text.rstrip().lstrip("\r\n")):
                blank = not document or document.isspace()
                if not blank and (self.part or held_out_document(document, *self.fractions)) == part:
                    yield document, label if label is None else str(label)

    def features(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """The types of the columns of :meth:`tokens`."""
        from datasets import LargeList, Value

        return {"tokens": LargeList(Value(tokenizer.dtype.name)), "label": Value("string")}

    def tokens(self, batch: Mapping[str, Sequence[Any]], places: Sequence[int], part: str, tokenizer: Tokenizer) -> pa.Table:
        """The ``tokens`` and the ``label`` of the documents of a part in rows, which have these places in the data."""
        documents = [*self.documents(batch, part, places[0])]
        return table(*joined(tokenizer, [text for text, _ in documents]), [label for _, label in documents])


@dataclass(frozen=True)
class Rows:
    """Rows of a data set, and how they become documents."""

    dataset: Any
    rules: DocumentRules

    @classmethod
    def checked(cls, dataset: Any, rules: DocumentRules) -> "Rows":
        """The columns that ``rules`` read; see :meth:`DocumentRules.checked`. If they say so, without refused rows."""
        rules = rules.checked(dataset)
        dataset = dataset.select_columns(rules.columns)  # to decode other columns may ask a server
        return cls(usable(dataset, rules) if rules.skip else dataset, rules)

    def may_be_in(self, part: str) -> bool:
        return self.rules.part in (None, part)

    def batches(self, part: str, size: int = BATCH) -> Iterator[list[str]]:
        """The texts of a part, those of ``size`` rows at once."""
        batches, first = self.dataset.iter(size), 0
        while True:
            with library_errors(self.rules.source):
                batch = next(batches, None)
            if batch is None:
                return
            yield [text for text, _ in self.rules.documents(batch, part, first)]
            first += size

    def tokens(self, part: str, tokenizer: Tokenizer, cache: Path, num_proc: int | None) -> Any:
        """The documents of a part as a data set of ``tokens``, an end token after each, and ``label``."""
        from datasets import Features
        from datasets.fingerprint import Hasher

        key = Hasher.hash([FORMAT, self.dataset._fingerprint, asdict(self.rules), part, tokenizer.fingerprint])
        with library_errors(f"the text or its cache; if {cache} is damaged, delete it"):
            found = self.dataset.map(
                self.rules.tokens,
                with_indices=True,
                batched=True,
                batch_size=BATCH,
                remove_columns=self.dataset.column_names,
                fn_kwargs={"part": part, "tokenizer": tokenizer},
                features=Features(self.rules.features(tokenizer)),
                num_proc=num_proc,
                cache_file_name=str((cache / f"tokens-{key}.arrow").absolute()),
                new_fingerprint=key,
                desc=f"tokenising {part}",
            )
            found.data.validate(full=True)  # else a damaged offset is followed out of the file
        return found


def usable(dataset: Any, rules: DocumentRules) -> Any:
    """The rows that a document can be made of. Warns of how many there are of others, but not of a stream."""
    from datasets import Dataset

    with library_errors(rules.source):
        found = dataset.filter(rules.is_usable)
        left_out = len(dataset) - len(found) if isinstance(dataset, Dataset) else 0
    if left_out:
        rows = counted(left_out, "row")
        warnings.warn(f"data: left out {rows} of {rules.source} without text, class or answer", stacklevel=2)
    return found


def table(tokens: np.ndarray, lengths: np.ndarray, labels: Sequence[str | None]) -> pa.Table:
    """Documents as rows of Arrow."""
    listed = pa.LargeListArray.from_arrays(offsets_of(lengths), tokens)
    return pa.table({"tokens": listed, "label": pa.array(labels, pa.string())})


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Where documents begin, and the last one ends; in 64 bits, since a batch may hold large files."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def joined(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of texts, an end token after each, and the length of each with it."""
    ids, lengths = tokenizer.encode_batch([utf8(text) for text in texts])
    return np.insert(ids, np.cumsum(lengths), tokenizer.end_id), lengths + 1


def held_out_document(text: str, val_fraction: float, test_fraction: float) -> str:
    """The part of a document, by a hash of its text: equal documents are in the same part."""
    place = fraction_of(text)
    return "test" if place < test_fraction else "val" if place < test_fraction + val_fraction else "train"


def fraction_of(text: str) -> float:
    """A hash in [0, 1)."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", errors="replace"), digest_size=6).digest(), "big") / 2**48


class Corpus:
    """The documents of a part, from the ``dataset`` of :meth:`Rows.tokens`.

    Attributes:
        tokens: all documents, an end token after each.
        offsets: (D + 1,) int64, where each document begins, and the number of tokens.
        labels: (D,) int64, the class of each document or -1; None if there are no classes.
        answers: for each token, 1 if it is of an answer; None: there are none.
    """

    def __init__(self, dataset: Any, part: str, classes: list[str]) -> None:
        self.part, self.classes = part, classes
        self.tokens = Tokens(dataset)
        self.answers = Tokens(dataset, "answers") if "answers" in dataset.column_names else None
        lengths = [np.diff(chunk.offsets.to_numpy()) for chunk in dataset.data.column("tokens").chunks]
        self.offsets = np.concatenate([np.zeros(1, np.int64), *lengths]).cumsum()
        self.labels = None
        if classes:
            import pyarrow.compute as pc  # this import takes half a second

            labels = pc.utf8_trim_whitespace(dataset.data.column("label"))  # ty: ignore[missing-attribute]: made when imported
            found = pc.index_in(labels, pa.array(classes))  # ty: ignore[missing-attribute]
            self.labels = found.fill_null(-1).to_numpy().astype(np.int64)


class Tokens:
    """The tokens of a data set, or what another column has of each, in one row, a slice of which is an array.

    A worker process maps the files again: a data set of the datasets library is pickled as the paths of its files.
    Chunks are found by bisection: there may be 100,000 of them, and a slice by pyarrow walks through all of them.
    """

    def __init__(self, dataset: Any, column: str = "tokens") -> None:
        self.dataset, self.column = dataset, column
        self.chunks = [chunk.flatten().to_numpy() for chunk in dataset.data.column(column).chunks]
        *self.begins, self.size = accumulate(map(len, self.chunks), initial=0)

    def __reduce__(self) -> tuple:
        return Tokens, (self.dataset, self.column)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, place: slice) -> np.ndarray:
        first, last, _ = place.indices(self.size)
        last = max(first, last)
        number = bisect_right(self.begins, first) - 1
        chosen = slice(number, max(bisect_left(self.begins, last), number + 1))
        found = zip(self.begins[chosen], self.chunks[chosen], strict=True)
        return np.concatenate([chunk[max(first - begin, 0) : last - begin] for begin, chunk in found])


def as_it_is(batch: Batch) -> Batch:
    """A collate function for batches that are complete already."""
    return batch
