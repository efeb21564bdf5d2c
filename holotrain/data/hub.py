"""What Hugging Face's datasets library reads: files, folders of files, folders that ``save_to_disk`` wrote, and the Hub.

The library runs no code that comes with a data set: it has no loading scripts since version 4, and reads no pickles.
"""

import codecs
import io
import json
import re
import sys
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from glob import escape, glob
from itertools import accumulate, chain
from lzma import LZMAError
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args
from zipfile import BadZipFile
from zlib import error as ZlibError

from holotrain.errors import UserError, check_choice, did_you_mean
from holotrain.files import open_regular, require_inside
from holotrain.numeric import require_one_of

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

Format = Literal["json", "csv", "tsv", "parquet", "text", "arrow", "imagefolder"]
"""Builders of the library; ``tsv`` is its ``csv`` with tabs."""

FORMATS: dict[str, Format] = {".jsonl": "json", ".ndjson": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "tsv"}
"""The builder for files of rows, by their suffix. All others are plain text: of a project, ``.json`` are mostly settings."""

EXTENSIONS = {".jpg", ".jpeg", ".jfif", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif", ".avif"}
"""Of the files in a folder that are read as images; the first frame of an animation."""

OF_DATA: dict[str, Format] = FORMATS | {".json": "json", ".txt": "text", ".arrow": "arrow"}
OF_DATA |= dict.fromkeys(EXTENSIONS, "imagefolder")
"""The same for files of a data set."""

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
"""Files that name the columns of a folder of images."""

RAISED = (OSError, ValueError, RuntimeError, EOFError, MemoryError, BadZipFile, LZMAError, ZlibError)
"""What the library raises besides its own exceptions and Arrow's."""

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
    except (*RAISED, StopIteration, ArrowException, DatasetsError, HTTPError) as error:
        while error.__cause__ is not None and not isinstance(error, UserError):
            error = error.__cause__
        if isinstance(error, UserError):  # the library wraps whatever ends its reading
            raise error
        empty = isinstance(error, StopIteration)  # so the library ends where a file is empty
        reason = "there is nothing in it" if empty else str(error).strip() or type(error).__name__
        others = "; for text that is not UTF-8, give data.encoding, such as latin-1" if isinstance(error, UnicodeError) else ""
        raise UserError(f"data: cannot read {what} ({reason.splitlines()[0]}){others}") from error
    finally:
        datasets.logging.set_verbosity(verbosity)
        if without_bars:
            datasets.enable_progress_bars()


def read_files(
    kind: str,
    files: Mapping[str, Sequence[Path]],
    cache: Path,
    streaming: bool = False,
    num_proc: int | None = None,
    **options: Any,
) -> "dict[str, Dataset | IterableDataset]":
    """Groups of files, read by a builder of the library into Arrow files in ``cache``.

    Their names are not patterns, and nothing beside them is looked at.

    Args:
        kind: one of :data:`Format`. A field of ``csv`` and ``tsv`` is text as it is written; an empty one is missing.
        streaming: read them while training instead.
        options: of the builder; ``sep`` and ``encoding`` of ``csv`` and ``tsv`` are found, if they are not given.

    Raises:
        UserError: one cannot be read, is no regular file or is compressed.
    """
    from datasets import load_dataset_builder
    from datasets.packaged_modules.json.json import JsonConfig
    from pyarrow.parquet import read_schema

    paths = [*chain(*files.values())]
    others = f" or one of {len(paths) - 1} other files" if len(paths) > 1 else ""
    with library_errors(f"{paths[0]}{others}"):
        for path in paths:
            require_uncompressed(path)
            if kind == "json":
                require_shallow(path)
            if kind == "parquet":
                require_narrow(path, read_schema(path).names)
        if kind in ("csv", "tsv"):
            options |= csv_options(paths, {"encoding": encoding_of(paths[0]), "sep": separator_of(paths[0], kind)} | options)
        if kind == "json" and hasattr(JsonConfig, "parse_agent_traces"):
            options["parse_agent_traces"] = False  # else some columns are taken for those of other programs
        if streaming and kind in ("json", "text"):
            options["chunksize"] = CHUNK
        named = {group: [escape(str(path.absolute())) for path in paths] for group, paths in files.items()}
        name = "csv" if kind == "tsv" else kind
        builder: Any = load_dataset_builder(name, data_files=named, cache_dir=str(cache), **options)
        if streaming:
            return {group: with_columns(dataset) for group, dataset in builder.as_streaming_dataset().items()}
        builder.download_and_prepare(num_proc=num_proc)
        return builder.as_dataset()


WIDEST = 1000
"""Columns of a table. The library needs a minute for ten times as many."""

DEEPEST = 1000
"""Objects and lists within each other in a row of JSON. Arrow calls itself for each, and some 10,000 end the process."""


def require_shallow(path: Path) -> None:
    """Raises a UserError if a row of a file of JSON is nested more deeply than :data:`DEEPEST`, or has too many columns."""
    with open_regular(path) as file:
        for number, line in enumerate(iter(partial(file.readline, 2**24), b""), 1):
            if line.count(b"[") + line.count(b"{") > DEEPEST and depth_of(line) > DEEPEST:
                raise UserError(f"data: {path}, line {number}: more than {DEEPEST} lists and objects within each other")
            if line.count(b":") > WIDEST:
                with suppress(ValueError, RecursionError):  # part of a row, or of a list of several lines
                    row = json.loads(line)
                    require_narrow(path, row if isinstance(row, dict) else ())


def require_narrow(path: Path, names: Collection[str]) -> None:
    """Raises a UserError if there are more columns than :data:`WIDEST`."""
    if len(names) > WIDEST:
        raise UserError(f"data: {path} has {len(names)} columns; at most {WIDEST} are read")


def depth_of(text: bytes) -> int:
    """The most lists and objects within each other."""
    brackets = re.sub(rb"[^][{}]", b"", re.sub(rb'"(?:[^"\\]|\\.)*"', b"", text))
    return max(accumulate(1 if bracket in b"[{" else -1 for bracket in brackets), default=0)


def encoding_of(path: Path) -> str:
    """The encoding of a text by its first bytes: UTF-16, UTF-32, else UTF-8."""
    with open_regular(path) as file:
        begin = file.read(4)
    if begin.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "utf-32"
    return "utf-16" if begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"


def separator_of(path: Path, kind: str, encoding: str | None = None) -> str:
    """What separates the fields of a file: of ``csv`` a comma, of ``tsv`` a tab; if its first line has none, another one."""
    usual = "\t" if kind == "tsv" else ","
    with open_regular(path) as file, io.TextIOWrapper(file, encoding or encoding_of(path), errors="replace") as text:
        first = text.readline()
    return next((each for each in (usual, ";", "\t", "|", ",") if each in first), usual)


def csv_options(paths: Sequence[Path], options: dict[str, Any]) -> dict[str, Any]:
    """Options of the library's builder of CSV files, which else reads ``007`` as 7 and takes ``NA`` for missing.

    Raises:
        UserError: a file has other columns than the first.
    """
    import pandas
    from datasets import Features, Value

    columns = [{*pandas.read_csv(path, nrows=0, **options).columns} for path in paths]
    for path, names in zip(paths, columns, strict=True):
        require_narrow(path, names)
        if names != columns[0]:
            raise UserError(f"data: {path} has other columns than {paths[0]}")
    texts = Features({name: Value("string") for name in sorted(columns[0])})
    return options | {"features": texts, "keep_default_na": False, "na_values": [""]}


def require_uncompressed(path: Path) -> None:
    """Raises a UserError if the library would unpack a file, whatever it is called, and an OSError if it is no regular file."""
    from datasets.utils.extract import Extractor

    open_regular(path).close()
    if Extractor.infer_extractor_format(path):
        raise UserError(f"data: {path} is compressed; unpack it")


class FromHub:
    """What data modules that read with the datasets library have in common.

    Args:
        name: a folder that save_to_disk wrote, a file, a glob, a folder of files, or a name on the Hub
        config: configuration of a data set of the Hub that has several
        split: split for the training set, and for the sets that have no split of their own
        val_split: split for the validation set; null: use val_fraction
        test_split: split for the test set; null: text uses test_fraction, images the validation set
        format: json, csv, tsv, parquet, text, arrow or imagefolder: how files are read; null: as their suffix says
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
        format: Format | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if format is not None:
            require_one_of(get_args(Format), format=format)
        self.name, self.config, self.format = name, config, format
        self.splits = {"train": split, "val": val_split, "test": test_split}

    def opened(self, streaming: bool = False) -> "dict[str, Dataset | IterableDataset]":
        """The parts that have a split.

        Raises:
            UserError: there is no such data set, configuration or split, its files are of several formats, or cannot be read.
        """
        from datasets import load_dataset

        splits = {part: split for part, split in self.splits.items() if split is not None}
        with library_errors(self.name):
            local = self._local_files()
            if local is None:
                options: dict[str, Any] = {"cache_dir": str(self.cache), "streaming": streaming}
                rows = {split: load_dataset(self.name, self.config, split=split, **options) for split in {*splits.values()}}
            else:
                _, kind, files = local
                for split in splits.values():
                    check_choice("data.split", split, files)
                rows = read_files(kind, files, self.cache, streaming)
            return {part: with_columns(rows[split]) for part, split in splits.items()}

    def folders(self) -> list[Path]:
        """Where the files lie that rows name: in the folder of the data, and for the Hub in those of the library."""
        import datasets.config
        import huggingface_hub.constants

        if local := self._local_files():
            return [local[0].resolve()]
        of_library = (datasets.config.HF_DATASETS_CACHE, huggingface_hub.constants.HF_HUB_CACHE)
        return [self.cache.resolve(), *(Path(each).resolve() for each in of_library)]

    def _local_files(self) -> tuple[Path, str, dict[str, list[Path]]] | None:
        """The folder of the data, the format of its files, and those of each split; None: the data are on the Hub."""
        path = Path(self.name).expanduser()
        if path.is_dir():
            found = (path, *files_in(path, self.format, self.cache))
        elif files := files_matching(path):
            found = (files[0].parent, self.format or format_of(files), {"train": files})
        elif path.exists():
            raise UserError(f"data.name: {path} is neither a file nor a folder")
        else:
            return None
        if self.config is not None:
            raise UserError(f"data.config: {self.name} has no configurations; only the Hub has")
        return found


def files_matching(path: Path) -> list[Path]:
    """The file at a path, whose name may look like a pattern, such as ``a[1].jsonl``; else those that the pattern matches."""
    if path.is_file():
        return [path]
    return [Path(name) for name in sorted(glob(str(path), recursive=True)) if Path(name).is_file()]


def format_of(files: Iterable[Path]) -> Format:
    """The format of all the files by their suffix. Raises a UserError if they are of several."""
    formats = sorted({OF_DATA.get(path.suffix.lower(), "text") for path in files})
    if "imagefolder" in formats and all(path.name in METADATA for path in files if path.suffix.lower() not in EXTENSIONS):
        return "imagefolder"
    if len(formats) > 1:
        raise UserError(f"data.format: the files are of several formats, {' and '.join(formats)}; choose one")
    return formats[0]


def files_in(folder: Path, chosen: Format | None, cache: Path) -> tuple[Format, dict[str, list[Path]]]:
    """The format of the files in a folder, and the files of each split. Those in ``cache`` are none of them.

    What a README.md or another file says of the files is not followed: it may name others, also of other machines.

    Raises:
        UserError: there are none, or they are of several formats.
        ValueError: one is a link that leads out of the folder.
    """
    root, own = folder.resolve(), cache.resolve()
    splits = saved_splits(root) or named_splits(root)
    wanted = {suffix for suffix, kind in OF_DATA.items() if chosen in (None, kind)}
    beside = METADATA if chosen == "imagefolder" else ()
    files = [path for each in splits.values() for path in each if path.suffix.lower() in wanted or path.name in beside]
    files = [path for path in files if not path.is_relative_to(own)]
    if not files:
        raise UserError(f"data.name: {folder} has no files of {', '.join(sorted(wanted))}")
    for path in files:
        require_inside(root, path)
    kind = chosen or format_of(files)
    parts = {split: [path for path in each if path in files] for split, each in splits.items()}
    return kind, {split: each for split, each in parts.items() if each}


def saved_splits(root: Path) -> dict[str, list[Path]]:
    """The files of each split in a folder that ``save_to_disk`` wrote; {}: it did not."""
    if (root / "state.json").is_file():
        return {"train": sorted(root.glob("data*.arrow"))}
    return {path.parent.name: sorted(path.parent.glob("data*.arrow")) for path in sorted(root.glob("*/state.json"))}


def named_splits(root: Path) -> dict[str, list[Path]]:
    """The files of each split that files or folders are named after, as the library finds them; else all are train."""
    from datasets.data_files import DataFilesDict, get_data_patterns

    base = escape(str(root))
    found = DataFilesDict.from_patterns(get_data_patterns(base), base)
    return {str(split): [Path(name) for name in names] for split, names in found.items()}


def with_columns(dataset: "Dataset | IterableDataset") -> "Dataset | IterableDataset":
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
        raise UserError(f"{option}: the rows of {source} have no column {name!r}; they have {names}.{near}")
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
    if isinstance(kind, Value) and "float" in kind.dtype:
        raise UserError(f"data.label: the labels in {name!r} are numbers with fractions; there are classes here, no regression")
    if not (isinstance(kind, Value) and any(each in kind.dtype for each in ("string", "int", "bool"))):
        raise UserError(f"data.label: column {name!r} holds no labels, but {kind}")
    return None


def in_order(labels: Iterable[Any]) -> list[Any]:
    """Labels in the order of their names; of numbers, if all are numbers."""
    labels = list(labels)
    numbers = all(str(label).removeprefix("-").isdecimal() for label in labels)
    return sorted(labels, key=lambda label: (int(label) if numbers else 0, label))
