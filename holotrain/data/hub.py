"""What Hugging Face's datasets library reads: files, folders that ``save_to_disk`` wrote, and the Hub.

The library runs no code that comes with a data set: it has no loading scripts since version 4, and reads no pickles.
"""

import os
import re
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from errno import EDQUOT, ENOSPC, EROFS
from functools import partial
from glob import escape, glob
from lzma import LZMAError
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np

from holotrain.data.decoding import EXTENSIONS
from holotrain.data.limits import EXPANSION, Expanding, limited, memory_up_to, most_of
from holotrain.data.loader import warn_of_left_out
from holotrain.errors import UserError, check_choice, did_you_mean
from holotrain.files import open_regular, read_json, require_inside

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from pyarrow import Table

KINDS = {".jsonl": "json", ".ndjson": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "tsv"}
"""How files of rows are read, by their extension; all others are plain text. Of a project, ``.json`` are mostly settings."""

OF_ROWS = KINDS | {".json": "json"}
"""The same for a file that is named alone, or with its like."""

OF_FOLDERS = OF_ROWS | {".txt": "text"} | dict.fromkeys(EXTENSIONS, "imagefolder")
"""The same for a folder: of the kinds in it, the most frequent is read."""

SPLITS = {"train": "train", "training": "train"}
SPLITS |= dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
SPLITS |= dict.fromkeys(("test", "testing", "eval", "evaluation"), "test")
"""Words in the names of files and folders, and the splits that they stand for, as for the library."""

SHARD = re.compile(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}")
"""The name of one of several files of a split; the library looks for it before those words."""

NO_ROWS = ("config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json")
"""Files that describe others."""

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
"""What names the columns of a folder of images."""

ROWS = 1000
"""Rows of a Parquet file that are decoded at once; the library decodes a whole group, of any size."""

RAISED = (OSError, ValueError, RuntimeError, EOFError, MemoryError, BadZipFile, LZMAError, zlib.error)
"""What the library raises besides its own exceptions and Arrow's."""

SHARDS = 64
"""A saved data set is streamed in up to so many shards, which are divided among processes and workers."""

CHUNK = 2**20
"""Bytes of a file that are parsed at once while streaming. The library's own 10 MB cost 30 MiB more of memory."""


@contextmanager
def library_errors(what: str) -> Generator[None]:
    """Turns the library's errors inside into a UserError of one line that names ``what`` is read. Progress bars are shown on
    a terminal only.

    Put calls of the library into it, and no ``yield``: meanwhile, the library logs nothing.
    """
    import datasets.config
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HTTPError
    from pyarrow import ArrowException

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else even files on this machine are reported to the Hub
    without_bars = not sys.stderr.isatty() and datasets.is_progress_bar_enabled()
    if without_bars:
        datasets.disable_progress_bars()
    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are logged before they are raised
    try:
        yield
    except (*RAISED, ArrowException, DatasetsError, HTTPError) as error:
        while error.__cause__ is not None and not isinstance(error, UserError):
            error = error.__cause__
        if isinstance(error, UserError):  # the library wraps whatever ends its reading
            raise error
        if isinstance(error, MemoryError):
            raise UserError(f"data: cannot read {what} (it needs too much memory)") from error
        if isinstance(error, OSError) and error.errno in (ENOSPC, EDQUOT, EROFS):  # nothing else is written while it reads
            raise UserError(f"data.cache_dir: cannot write the cache of {what} ({os.strerror(error.errno)})") from error
        reason = str(error).strip() or type(error).__name__
        raise UserError(f"data: cannot read {what} ({reason.splitlines()[0]})") from error
    finally:
        datasets.logging.set_verbosity(verbosity)
        if without_bars:
            datasets.enable_progress_bars()


def cached(rows: Callable[[], Iterable[dict[str, Any]]], features: dict[str, Any], cache: Path, *key: Any) -> "Dataset":
    """The rows that a function returns, from the library's cache after the first time.

    Args:
        features: the type of each column.
        key: everything that the rows depend on.
    """
    from datasets import Dataset, Features
    from datasets.fingerprint import Hasher

    with library_errors(f"the text or its cache; if {cache} is damaged, delete it"):
        found = Dataset.from_generator(rows, Features(features), cache_dir=str(cache), fingerprint=Hasher.hash(key))
        found.data.validate(full=True)  # else a damaged offset is followed out of the file
    return found


def files_read(
    kind: str,
    files: Mapping[str, Sequence[Path]],
    cache: Path,
    streaming: bool = False,
    num_proc: int | None = None,
    expansion: float = EXPANSION,
    **options: Any,
) -> "dict[str, Dataset | IterableDataset]":
    """Groups of files, read with a builder of the library's, such as ``json``, or as ``tsv``, into Arrow files in ``cache``.

    Their names are not patterns, and nothing beside them is looked at.

    Args:
        streaming: read them while training instead.
        expansion: how many times as large as the files what is read may be.
        options: of the builder.

    Raises:
        UserError: one cannot be read, or they become too large.
    """
    from datasets import load_dataset_builder

    paths = [path for group in files.values() for path in group]
    others = f" or one of {len(paths) - 1} other files" if len(paths) > 1 else ""
    if kind in ("csv", "tsv"):
        options |= {"sep": "\t" if kind == "tsv" else ",", "keep_default_na": False, "na_values": [""]}
        kind = "csv"
    if kind == "parquet":
        options["batch_size"] = ROWS
    if streaming and kind in ("json", "text"):
        options["chunksize"] = CHUNK
    with library_errors(f"{paths[0]}{others}"):
        for path in paths:
            open_regular(path).close() if kind == "imagefolder" else require_uncompressed(path)
        named = {group: [escape(str(path.absolute())) for path in paths] for group, paths in files.items()}
        builder: Any = load_dataset_builder(kind, data_files=named, cache_dir=str(cache), **options)
        refusal = f"data: {paths[0]}{others} becomes larger than data.max_expansion={expansion:g} times its size"
        tables = "_read_metadata" if kind == "imagefolder" else "_generate_tables"
        own = partial(csv_tables, builder.config) if kind == "csv" else getattr(builder, tables)
        setattr(builder, tables, partial(limited, most_of(paths, expansion), refusal, own))
        if streaming:
            return {group: resolved(dataset) for group, dataset in builder.as_streaming_dataset().items()}
        builder.download_and_prepare(num_proc=num_proc)
        return builder.as_dataset()


def csv_tables(
    config: Any, base_files: Sequence[str], files_iterables: Sequence[Iterable[str]]
) -> Iterator[tuple[Any, "Table"]]:
    """What the library's builder of CSV files yields, but every field is text, as it is written; an empty one is missing.

    The library guesses types: it reads ``007`` as 7, and takes ``NA`` and ``null`` for missing.
    """
    import pandas
    import pyarrow
    from datasets.builder import Key

    for shard, files in enumerate(files_iterables):
        for file in files:
            for number, frame in enumerate(pandas.read_csv(file, dtype=str, iterator=True, **config.pd_read_csv_kwargs)):
                fields = {name: pyarrow.array(frame[name], pyarrow.string(), from_pandas=True) for name in frame}
                yield Key(shard, number), pyarrow.table(fields)


def require_uncompressed(path: Path) -> None:
    """Raises a UserError if the library would unpack a file, whatever it is called, and an OSError if it is no regular file."""
    from datasets.utils.extract import Extractor

    open_regular(path).close()
    with memory_up_to(0):  # it unpacks the beginning, to look for an archive within
        packed = Extractor.infer_extractor_format(path)
    if packed:
        raise UserError(f"data: {path} is compressed; unpack it")


def rows_without(dataset: "Dataset | IterableDataset", columns: Sequence[str | None]) -> list[int]:
    """The rows, counted from 1, that have nothing in one of the columns, as far as there are such columns."""
    found, before = [], 0
    for table in dataset.with_format("arrow").iter(1000):
        for name in {*columns}.intersection(table.column_names):
            found += (np.flatnonzero(table.column(name).is_null()) + before + 1).tolist()
        before += len(table)
    return sorted({*found})


class FromHub(Expanding):
    """What data modules that read with the datasets library have in common.

    Args:
        name: a folder that save_to_disk wrote, a file, a glob, a folder of files, or a name on the Hub
        config: configuration of a data set of the Hub that has several
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
        with library_errors(self.name):
            return {part: resolved(self._split(split, streaming)) for part, split in self.splits.items() if split is not None}

    def folders(self) -> list[Path]:
        """Where files lie that the data name: the folder of the data, and for the Hub the library's."""
        import datasets.config
        import huggingface_hub.constants

        if files := self._files():
            return [files[0].parent.resolve()]
        if (folder := Path(self.name).expanduser()).is_dir():
            return [folder.resolve()]
        of_library = (datasets.config.HF_DATASETS_CACHE, huggingface_hub.constants.HF_HUB_CACHE)
        return [self.cache.resolve(), *(Path(each).resolve() for each in of_library)]

    def _files(self) -> list[Path]:
        pattern = str(Path(self.name).expanduser())
        if Path(pattern).is_file():  # its name may look like a pattern, such as a[1].jsonl
            return [Path(pattern)]
        return [Path(each) for each in sorted(glob(pattern, recursive=True)) if Path(each).is_file()]

    def _split(self, split: str, streaming: bool) -> "Dataset | IterableDataset":
        """One split; a stream may not know its columns yet."""
        from datasets import load_dataset

        name, folder, files = self.name, Path(self.name).expanduser(), self._files()
        if not files and not folder.exists():
            return load_dataset(name, self.config, split=split, cache_dir=str(self.cache), streaming=streaming)
        if self.config is not None:
            raise UserError(f"data.config: {name} has no configurations; only the Hub has")
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            splits = saved(folder)
            check_choice("data.split", split, splits)
            return splits[split].to_iterable_dataset(min(SHARDS, len(splits[split]))) if streaming else splits[split]
        if files:
            kind, parts = kind_of(name, files), {"train": files}
        elif folder.is_dir():
            kind, parts = files_within(folder, self.cache)
        else:
            raise UserError(f"data.name: {name} is neither a file nor a folder")
        check_choice("data.split", split, parts)
        return files_read(kind, parts, self.cache, streaming, expansion=self.expansion)[split]


def kind_of(name: str, files: Sequence[Path]) -> str:
    """How the files that a glob matches are read. Raises a UserError if they are of several kinds."""
    kinds = {OF_ROWS.get(suffix, "text"): suffix for suffix in sorted({each.suffix.lower() for each in files})}
    if len(kinds) > 1:
        raise UserError(f"data.name: {name} matches files of several kinds, {' and '.join(kinds.values())}; name one of them")
    return next(iter(kinds))


def saved(folder: Path) -> "dict[str, Dataset]":
    """The splits in a folder that ``save_to_disk`` wrote.

    Raises:
        ValueError: it is damaged, or names files elsewhere.
    """
    from datasets import DatasetDict, load_from_disk

    try:
        listed = folder / "dataset_dict.json"
        names = [".", *(read_json(listed)["splits"] if listed.is_file() else ())]
        states = [state for name in names if (state := folder / name / "state.json").is_file()]
        files = {state.parent / each["filename"] for state in states for each in read_json(state)["_data_files"]}
        for file in files:
            require_inside(folder, file)
        with memory_up_to(sum(file.stat().st_size for file in files)):  # they are mapped, but for what is compressed in them
            found = load_from_disk(str(folder))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("it does not list its files") from error
    splits = found if isinstance(found, DatasetDict) else {"train": found}
    return {str(name): split.with_format(None) for name, split in splits.items()}


def files_within(folder: Path, cache: Path) -> tuple[str, dict[str, list[Path]]]:
    """How the files in a folder are read, and the files of each split that a file or folder is named after; else all are train.

    What a README.md says of the files is not followed: it may name others, also of other machines. Warns of what is left out.

    Raises:
        UserError: there are none.
        ValueError: one is a link that leads out of the folder.
    """
    root, own = folder.resolve(), cache.resolve()
    shown = [path for path in sorted(root.rglob("*")) if not (path.is_relative_to(own) or _is_hidden(path.relative_to(root)))]
    kinds = {path: OF_FOLDERS.get(path.suffix.lower()) for path in shown if path.name not in NO_ROWS and path.is_file()}
    found = {path: kind for path, kind in kinds.items() if kind}
    if not found:
        raise UserError(f"data.name: {folder} has no files of {', '.join(sorted(OF_FOLDERS))}")
    kind = Counter(found.values()).most_common(1)[0][0]
    parts: dict[str, list[Path]] = defaultdict(list)
    for path in found:
        if found[path] == kind or (kind == "imagefolder" and path.name in METADATA):
            require_inside(root, path)
            parts[_split_of(path.relative_to(root))].append(path)
    splits = {split: files for split, files in parts.items() if split} or {"train": parts[""]}
    others = sorted({*found}.difference(*splits.values()))
    warn_of_left_out("file", "of another kind or of no split", [str(path.relative_to(root)) for path in others])
    links = [str(path.relative_to(root)) for path in shown if path.is_symlink() and path.is_dir()]
    warn_of_left_out("folder", "that is a link" if len(links) == 1 else "that are links", links)
    return kind, splits


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "__")) for part in path.parts)


def _split_of(path: Path) -> str:
    if shard := SHARD.match(path.name):
        return shard[1]
    words = re.split(r"[^a-z]+", path.as_posix().lower())
    return next((SPLITS[word] for word in words if word in SPLITS), "")


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
        names = ", ".join(features)
        near = did_you_mean(name, features)
        if option == "data.text" and "messages" in features:
            near = " For chats (task=causal_lm), give data.messages=messages"
        raise UserError(f"{option}: {source} have no column {name!r}; they have {names}.{near}")
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
    if not (isinstance(kind, Value) and any(each in kind.dtype for each in ("string", "int", "bool"))):
        raise UserError(f"data.label: column {name!r} holds no labels, but {kind}")
    return None


def in_order(labels: Iterable[Any]) -> list[Any]:
    """Labels in the order of their names; of numbers, if all are numbers."""
    labels = list(labels)
    numbers = all(str(label).removeprefix("-").isdecimal() for label in labels)
    return sorted(labels, key=lambda label: (int(label) if numbers else 0, label))
