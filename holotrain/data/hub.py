"""What Hugging Face's datasets library reads: files, folders that ``save_to_disk`` wrote, and the Hub.

The library runs no code that comes with a data set: it has no loading scripts since version 4, and reads no pickles.
"""

import os
import sys
import time
import zlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from errno import EDQUOT, ENOSPC, EROFS
from glob import escape, glob
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from holotrain.errors import UserError, did_you_mean, one_of

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

KINDS = {".jsonl": "json", ".ndjson": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "tsv"}
"""How files of rows are read, by their extension; all others are plain text. Of a project, ``.json`` are mostly settings."""

OF_ROWS = KINDS | {".json": "json"}
"""The same for a file that is named alone, or with its like."""

SHARDS = 64
"""A saved data set is streamed in up to so many shards, which are divided among processes and workers."""

CHUNK = 2**20
"""Bytes of a file that are parsed at once while streaming. The library's own 10 MB cost 30 MiB more of memory."""

EVERY = 10.0
"""Seconds between two lines of progress, where standard error is no terminal."""


class ProgressLines:
    """A stream on which a progress bar, which would be drawn again and again, is a line now and then."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.due, self.bar = stream, time.monotonic() + EVERY, False

    def write(self, text: str) -> int:
        after_bar, self.bar = self.bar, text.startswith("\r")
        if self.bar and text.strip() and time.monotonic() >= self.due:
            self.due = time.monotonic() + EVERY
            self.stream.write(f"{text.strip()}\n")
        elif not (self.bar or (after_bar and text == "\n")):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def reading(what: str) -> Generator[None]:
    """Within it, what the library finds wrong becomes a UserError of one line, and off a terminal its progress bars are lines.

    Put calls of the library into it, and no ``yield``: meanwhile, the library logs nothing. ``what`` is read, for messages.
    """
    import datasets.config
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HTTPError
    from pyarrow import ArrowException

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else even files on this machine are reported to the Hub
    shown = nullcontext() if sys.stderr.isatty() else redirect_stderr(ProgressLines(sys.stderr))
    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are logged before they are raised
    try:
        with shown:
            yield
    except (OSError, ValueError, RuntimeError, EOFError, zlib.error, ArrowException, DatasetsError, HTTPError) as error:
        while error.__cause__ is not None:
            error = error.__cause__
        if isinstance(error, (UserError, MemoryError)):  # the library wraps whatever ends its reading
            raise error
        if isinstance(error, OSError) and error.errno in (ENOSPC, EDQUOT, EROFS):  # nothing else is written while it reads
            raise UserError(f"data.cache_dir: cannot write the cache of {what} ({os.strerror(error.errno)})") from error
        said = str(error).strip() or type(error).__name__
        raise UserError(f"data: cannot read {what} ({said.splitlines()[0]})") from error
    finally:
        datasets.logging.set_verbosity(verbosity)


@contextmanager
def writing(cache: Path) -> Generator[None]:
    """Turns an OSError inside into a UserError: the cache cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"data.cache_dir: cannot write {error.filename or cache} ({error.strerror or error})") from error


def files_read(
    kind: str,
    files: Mapping[str, Sequence[Path | str]],
    cache: Path,
    streaming: bool = False,
    num_proc: int | None = None,
    **options: Any,
) -> "dict[str, Dataset | IterableDataset]":
    """Groups of files, read with a builder of the library's, such as ``json``, or as ``tsv``, into Arrow files in ``cache``.

    Args:
        streaming: read them as they are asked for instead.
        options: of the builder.

    Raises:
        UserError: one cannot be read.
    """
    if kind == "tsv":
        kind, options = "csv", options | {"sep": "\t"}
    if not streaming:
        options["num_proc"] = num_proc
    elif kind in ("json", "text"):
        options["chunksize"] = CHUNK
    named = {group: [escape(str(Path(each).absolute())) for each in paths] for group, paths in files.items()}
    paths = [Path(each) for group in files.values() for each in group]
    others = f" or one of {len(paths) - 1} other files" if len(paths) > 1 else ""
    with reading(f"{paths[0]}{others}"):
        read = loaded(kind, paths, cache, data_files=named, streaming=streaming, **options)
        return {group: resolved(dataset) for group, dataset in read.items()}


def loaded(builder: str, paths: Iterable[Path], cache: Path, **options: Any) -> Any:
    """What ``load_dataset`` reads from files of this machine, anew if the size or the time of one of ``paths`` has changed.

    The library looks at the times alone, rounded, and some tools keep the time of a file that they change.
    """
    from datasets import Dataset, load_dataset
    from datasets.fingerprint import Hasher

    fingerprint = fingerprint_of(paths)
    read = load_dataset(builder, cache_dir=str(cache / fingerprint), **options)
    for dataset in read.values() if isinstance(read, dict) else [read]:
        if isinstance(dataset, Dataset):
            dataset._fingerprint = Hasher.hash([dataset._fingerprint, fingerprint])  # the name of its tokens
    return read


def fingerprint_of(paths: Iterable[Path], *words: str) -> str:
    """A hash of files' paths, sizes and times, and of words."""
    from datasets.fingerprint import Hasher

    files = [(str(path.absolute()), path.stat()) for path in paths]
    return Hasher.hash([*((path, stat.st_size, stat.st_mtime_ns) for path, stat in files), *words])


def rows_without(dataset: "Dataset | IterableDataset", columns: Sequence[str]) -> list[int]:
    """The rows, counted from 1, that have nothing in one of the columns, as far as there are such columns."""
    found, before = [], 0
    for table in dataset.with_format("arrow").iter(1000):
        for name in {*columns}.intersection(table.column_names):
            found += (np.flatnonzero(table.column(name).is_null()) + before + 1).tolist()
        before += len(table)
    return sorted({*found})


class FromHub:
    """What data modules that read with the datasets library have in common.

    Args:
        name: a folder that save_to_disk wrote, a file, a glob, a folder of files, or a name on the Hub
        config: configuration of a data set that has several
        split: split for the training set, and for the sets that have no split of their own
        val_split: split for the validation set; null: use val_fraction
        test_split: split for the test set; null: text uses test_fraction, images the validation set
        options: those of the next class
    """

    cache: Path
    """Folder in which what is read is cached."""

    def __init__(
        self,
        name: str,
        config: str | None = None,
        split: str = "train",
        val_split: str | None = None,
        test_split: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.name, self.config = name, config
        self.splits = {"train": split, "val": val_split, "test": test_split}

    def opened(self, streaming: bool = False) -> "dict[str, Dataset | IterableDataset]":
        """The parts that have a split.

        Raises:
            UserError: there is no such data set, configuration or split, its files are of several kinds, or it cannot be read.
        """
        with reading(self.name):
            return {part: resolved(self._split(split, streaming)) for part, split in self.splits.items() if split is not None}

    def _split(self, split: str, streaming: bool) -> "Dataset | IterableDataset":
        """One split; a stream may not know its columns yet."""
        from datasets import DatasetDict, load_dataset, load_from_disk

        name, config, folder = self.name, self.config, Path(self.name).expanduser()
        saved = (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()
        files = [each for each in sorted(glob(str(folder), recursive=True)) if Path(each).is_file()]
        if config is not None and (saved or files):
            raise UserError(f"data.config: {name} has no configurations; only the Hub and folders of files do")
        if saved:
            found = load_from_disk(str(folder))
            splits = found if isinstance(found, DatasetDict) else {"train": found}
            one_of("data.split", split, map(str, splits))
            return splits[split].to_iterable_dataset(min(SHARDS, len(splits[split]))) if streaming else splits[split]
        if files:
            one_of("data.split", split, ["train"])
            kinds = {OF_ROWS.get(suffix, "text"): suffix for suffix in sorted({Path(each).suffix for each in files})}
            if len(kinds) > 1:
                raise UserError(
                    f"data.name: {name} matches files of several kinds, {' and '.join(kinds.values())}; name one of them"
                )
            return files_read(next(iter(kinds)), {split: files}, self.cache, streaming)[split]
        if folder.is_dir():
            own = self.cache.absolute()
            paths = sorted(each for each in folder.absolute().rglob("*") if each.is_file() and not each.is_relative_to(own))
            return loaded(str(folder.absolute()), paths, self.cache, name=config, split=split, streaming=streaming)
        return load_dataset(name, config, split=split, cache_dir=str(self.cache), streaming=streaming)


def resolved(dataset: "Dataset | IterableDataset") -> "Dataset | IterableDataset":
    """A data set whose columns are known; for some streams the first rows tell them."""
    from datasets import IterableDataset

    return dataset._resolve_features() if isinstance(dataset, IterableDataset) and not dataset.features else dataset


def column(dataset: "Dataset | IterableDataset", option: str, name: str, source: str = "the data") -> Any:
    """The type of a column. ``option``, which names it, and ``source``, which has it, are for messages.

    Raises:
        UserError: there is no such column.
    """
    features = dataset.features or {}
    if name not in features:
        there = ", ".join(features)
        raise UserError(f"{option}: {source} have no column {name!r}; they have {there}.{did_you_mean(name, features)}")
    return features[name]


def class_names(dataset: "Dataset | IterableDataset", name: str, source: str = "the data") -> list[str] | None:
    """The names of the classes, if the data say them, whose numbers are the labels; None: each label is the name of a class.

    Raises:
        UserError: the column is missing, or holds no labels.
    """
    from datasets import ClassLabel, Value

    kind = column(dataset, "data.label", name, source)
    if isinstance(kind, ClassLabel):
        return kind.names
    if not (isinstance(kind, Value) and ("string" in kind.dtype or "int" in kind.dtype)):
        raise UserError(f"data.label: column {name!r} holds no labels, but {kind}")
    return None
