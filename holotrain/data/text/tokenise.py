"""From a source to a folder of tokens: documents are read, split into parts, encoded and written one after another."""

from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from holotrain.data.text.parts import PARTS, held_out_document, held_out_files, whole_files
from holotrain.data.text.progress import Progress
from holotrain.data.text.sources import Source, SourceFile
from holotrain.data.text.tokenizer import Tokenizer, utf8
from holotrain.errors import UserError

TOKENIZER = "tokenizer.json"
UNLABELLED = -1

BATCH = 2**20
"""Characters that are encoded at once."""

Reading = tuple[str, str, str | None]
"""A document's part, text and label."""


class Documents:
    """The documents of a source and the parts that they belong to.

    Args:
        files: those of the source.
        val_fraction, test_fraction: shares that are held out; a part that has its own files gets no others.
    """

    def __init__(self, source: Source, files: list[SourceFile], val_fraction: float, test_fraction: float) -> None:
        self.source, self.files = source, files
        given = {file.part for file in files}
        self.fractions = (0.0 if "val" in given else val_fraction, 0.0 if "test" in given else test_fraction)
        self.by_file = whole_files(files, source.reader.unit)
        self._parts = held_out_files(files, *self.fractions) if self.by_file else [file.part for file in files]

    def read(self, only: str | None = None, progress: Progress | None = None) -> Iterator[Reading]:
        """All documents, or those of one part, sorted by the names of their files.

        Raises:
            UserError: as :meth:`Source.documents` does.
        """
        for file, part in zip(self.files, self._parts, strict=True):
            if part is None or only in (None, part):
                for text, label in self.source.documents(file):
                    where = part or held_out_document(text, *self.fractions)
                    if only in (None, where):
                        yield where, text, label
            if progress is not None:
                progress.advance(file.path.stat().st_size)


def tokenised(documents: Documents, tokenizer: Callable[[Iterator[str]], Tokenizer], folder: Path) -> dict:
    """Writes tokens, offsets, labels and the tokenizer into a folder; returns the manifest.

    ``PART.bin`` holds all documents of a part, an end token after each; ``PART.offsets.npy`` (D + 1,) where each begins;
    ``PART.labels.npy`` (D,), if there are classes, the class of each, or -1.

    Args:
        tokenizer: makes the tokenizer from the texts of the training documents, which it may ignore.

    Raises:
        UserError: a part is empty, or the classes cannot be used for classification; or as the source raises.
    """
    total = sum(file.path.stat().st_size for file in documents.files)
    with Progress("reading for the vocabulary", total) as progress:
        known = tokenizer(text for _, text, _ in documents.read("train", progress))
    documents.source.reader.skipped = 0  # the documents are read again now, and counted again
    labels: dict[str | None, int] = {None: UNLABELLED}
    writers = {part: Writer(folder, part, known) for part in PARTS}
    with Progress("tokenising", total) as progress:
        for part, text, label in documents.read(progress=progress):
            writers[part].add(text, labels.setdefault(label, len(labels) - 1))
    _check_parts({part: len(writer) for part, writer in writers.items()}, documents)
    classes = _classes({label: index for label, index in labels.items() if label is not None}, writers)
    counts = {part: writer.finish([*classes.values()]) for part, writer in writers.items()}
    (folder / TOKENIZER).write_text(known.to_json(), encoding="utf-8")
    return {
        "tokenizer": known.fingerprint,
        "dtype": known.dtype.name,
        "classes": list(classes),
        "skipped": documents.source.reader.skipped,
        "parts": counts,
    }


class Writer:
    """Appends documents to one part."""

    def __init__(self, folder: Path, part: str, tokenizer: Tokenizer) -> None:
        self.folder, self.part, self.tokenizer = folder, part, tokenizer
        self.labels = array("q")
        self.bytes = 0
        self._offsets = array("q", [0])
        self._waiting: list[bytes] = []
        self._size = 0
        self._file = (folder / f"{part}.bin").open("wb")

    def __len__(self) -> int:
        return len(self.labels)

    def add(self, text: str, label: int) -> None:
        encoded = utf8(text)
        self._waiting.append(encoded)
        self._size += len(encoded)
        self.labels.append(label)
        if self._size >= BATCH:
            self.flush()

    def flush(self) -> None:
        """Encodes and writes the documents that were added since the last call."""
        ids, lengths = self.tokenizer.encode_batch(self._waiting)
        ends = np.cumsum(lengths)
        np.insert(ids, ends, self.tokenizer.end_id).tofile(self._file)
        self._offsets.extend((self._offsets[-1] + ends + np.arange(1, len(ends) + 1)).tolist())
        self.bytes += self._size
        self._waiting, self._size = [], 0

    def finish(self, classes: list[int]) -> dict[str, int]:
        """Writes the rest; returns the number of documents, tokens and bytes of text.

        Args:
            classes: the labels that documents were added with, in the order of the classes; empty if there are none.
        """
        self.flush()
        self._file.close()
        np.save(self.folder / f"{self.part}.offsets.npy", np.array(self._offsets, dtype=np.int64))
        if classes:
            rank = np.full(len(classes) + 1, UNLABELLED, dtype=np.int64)  # the last is that of label -1
            rank[classes] = np.arange(len(classes))
            np.save(self.folder / f"{self.part}.labels.npy", rank[np.array(self.labels, dtype=np.int64)])
        return {"documents": len(self), "tokens": self._offsets[-1], "bytes": self.bytes}


def _check_parts(counts: dict[str, int], documents: Documents) -> None:
    if not any(counts.values()):
        raise UserError(f"data: there is no text in any of the {len(documents.files)} files")
    for part, count in counts.items():
        if not count:
            fewer = "lower data.val_fraction and data.test_fraction" if part == "train" else f"raise data.{part}_fraction"
            there = f"documents: {sum(counts.values())}, files: {len(documents.files)}"
            raise UserError(
                f"data: no text is left for {part} ({there}); {fewer}, or cut finer with data.unit=paragraph or line"
            )


def _classes(labels: dict[str, int], writers: dict[str, Writer]) -> dict[str, int]:
    """The sorted labels (as numbers, if all are numbers), each with the index that its documents were given."""
    if not labels:
        return {}
    trained = set(writers["train"].labels)
    for label, index in labels.items():
        if index not in trained:
            raise UserError(f"data.label: class {label!r} is held out, but no training document has it")
    if len(labels) < 2:
        raise UserError(f"data.label: there is only one class, {next(iter(labels))!r}; at least two are needed")
    numbers = all(label.lstrip("-").isdecimal() for label in labels)
    return dict(sorted(labels.items(), key=lambda item: (int(item[0]) if numbers else 0, item[0])))
