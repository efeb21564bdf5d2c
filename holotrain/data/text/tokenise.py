"""From rows of a data set to documents and their tokens, which the datasets library keeps in Arrow files."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from holotrain.data.hub import class_names, column, reading
from holotrain.data.text.parts import held_out_document
from holotrain.data.tokenizers.restored import tokenizer_from_json
from holotrain.data.tokenizers.tokenizer import Tokenizer, utf8
from holotrain.errors import UserError

FORMAT = 2
"""Version of the tokens' files. Increase it whenever the same settings would write something else."""

BATCH = 256
"""Rows that are tokenised at once; a row may be a whole file."""

BETWEEN = {"paragraph": re.compile(r"\n(?:[ \t\r\f\v]*\n)+"), "line": re.compile(r"\r?\n")}
"""What separates the documents of a row."""


@dataclass(frozen=True)
class Reading:
    """How rows become documents.

    Attributes:
        unit: what a document is: a ``file`` or row, a ``paragraph`` between blank lines, or a ``line``.
        text, label: columns; ``label`` may be None.
        skip: leave out rows without text.
        fractions: of validation and test, for documents whose part is drawn.
    """

    unit: str = "file"
    text: str = "text"
    label: str | None = None
    skip: bool = False
    fractions: tuple[float, float] = (0.0, 0.0)

    def documents(self, batch: Mapping[str, Sequence[Any]], part: str | None, names: Sequence[str] | None) -> Iterator[tuple]:
        """The documents of rows that are not blank, each with its label or None.

        Args:
            part: only documents that are drawn for it; None: all.
            names: of the classes, if the labels are numbers of them.
        """
        labels = batch[self.label] if self.label else [None] * len(batch[self.text])
        for row, label in zip(batch[self.text], labels, strict=True):
            if row is None or (self.label and label is None):
                if self.skip:
                    continue
                missing = self.text if row is None else self.label
                raise UserError(f"data: a row has nothing in {missing!r}; data.on_error=skip leaves such rows out")
            if names is not None:
                label = names[label] if label >= 0 else None
            for text in [row] if self.unit == "file" else BETWEEN[self.unit].split(row.rstrip().lstrip("\r\n")):
                if text and not text.isspace() and (part is None or held_out_document(text, *self.fractions) == part):
                    yield text, label if label is None else str(label)


@dataclass(frozen=True)
class Rows:
    """Rows of a data set.

    Attributes:
        dataset: has the columns that ``reading`` names.
        part: that all of them belong to; None: it is drawn for each document.
        label: that all of them have; None: that of a column, or none.
        source: what has the columns, for messages.
    """

    dataset: Any
    reading: Reading
    part: str | None = None
    label: str | None = None
    source: str = "the data"

    def __post_init__(self) -> None:
        from datasets import Value

        kind = column(self.dataset, "data.text", self.reading.text, self.source)
        if not (isinstance(kind, Value) and "string" in kind.dtype):
            raise UserError(f"data.text: column {self.reading.text!r} holds no text, but {kind}")
        names = self.reading.label and class_names(self.dataset, self.reading.label, self.source)
        object.__setattr__(self, "names", names)

    def may_be_in(self, part: str) -> bool:
        return self.part in (None, part)

    def batches(self, part: str, size: int = BATCH) -> Iterator[list[str]]:
        """The texts of a part, those of ``size`` rows at once."""
        batches = self.dataset.iter(size)
        while True:
            with reading("the text"):
                batch = next(batches, None)
            if batch is None:
                return
            yield [text for text, _ in self.reading.documents(batch, None if self.part else part, self.names)]

    def tokens(self, part: str, tokenizer: Tokenizer, cache: Path, num_proc: int | None) -> Any:
        """The documents of a part as a data set of ``tokens``, an end token after each, and ``label``."""
        from datasets import Features, LargeList, Value
        from datasets.fingerprint import Hasher

        settings = [FORMAT, asdict(self.reading), self.label, self.names, None if self.part else part, tokenizer.fingerprint]
        key = Hasher.hash([self.dataset._fingerprint, json.dumps(settings)])
        with reading("the text"):
            return self.dataset.map(
                tokenised,
                batched=True,
                batch_size=BATCH,
                remove_columns=self.dataset.column_names,
                fn_kwargs={"rows": (self.reading, self.names, self.label), "part": None if self.part else part}
                | {"tokenizer": tokenizer.to_json()},
                features=Features({"tokens": LargeList(Value(tokenizer.dtype.name)), "label": Value("string")}),
                num_proc=num_proc,
                cache_file_name=str((cache / f"tokens-{key}.arrow").absolute()),
                new_fingerprint=key,
                desc=f"tokenising {part}",
            )


def tokenised(batch: Mapping[str, list], rows: tuple, part: str | None, tokenizer: str) -> pa.Table:
    """The ``tokens`` and the ``label`` of each document of some rows."""
    how, names, label = rows
    texts, labels = [], []
    for text, own in how.documents(batch, part, names):
        texts.append(text)
        labels.append(label or own)
    return table(*joined(known(tokenizer), texts), labels)


def table(tokens: np.ndarray, lengths: np.ndarray, labels: Sequence[str | None]) -> pa.Table:
    """Documents as rows of Arrow."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)  # a batch may hold large files
    return pa.table({"tokens": pa.LargeListArray.from_arrays(offsets, tokens), "label": pa.array(labels, pa.string())})


def joined(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of texts, an end token after each, and the length of each with it."""
    ids, lengths = tokenizer.encode_batch([utf8(text) for text in texts])
    return np.insert(ids, np.cumsum(lengths), tokenizer.end_id), lengths + 1


@lru_cache(1)
def known(tokenizer: str) -> Tokenizer:
    return tokenizer_from_json(tokenizer)
