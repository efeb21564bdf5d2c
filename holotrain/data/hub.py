"""What Hugging Face's datasets library reads: files, folders that ``save_to_disk`` wrote, and the Hub.

The library runs no code that comes with a data set: it has no loading scripts since version 4, and reads no pickles.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from glob import escape, glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holotrain.checks import did_you_mean, one_of
from holotrain.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

KINDS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}
"""How files of rows are read, by their extension; all others are plain text."""

SHARDS = 64
"""A saved data set is streamed in up to so many shards, which are divided among processes and workers."""


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Within it, what the library finds wrong becomes a UserError of one line, and its progress bars show on terminals only.

    Args:
        what: is read, for messages.
    """
    import datasets

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else even files on this machine are reported to the Hub
    (datasets.enable_progress_bars if sys.stderr.isatty() else datasets.disable_progress_bars)()
    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are logged before they are raised
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # what is missing, damaged or out of reach each raises differently
        while error.__cause__ is not None:
            error = error.__cause__
        said = str(error).strip() or type(error).__name__
        raise UserError(f"data: cannot read {what} ({said.splitlines()[0]})") from error
    finally:
        datasets.logging.set_verbosity(verbosity)


def files_read(
    kind: str,
    files: Mapping[str, Sequence[Path | str]],
    cache: Path,
    streaming: bool = False,
    num_proc: int | None = None,
    **options: Any,
) -> "dict[str, Dataset | IterableDataset]":
    """Files of one kind, in groups.

    Args:
        kind: a builder of the library's, such as ``text`` or ``json``.
        files: those of each group.
        cache: folder of the Arrow files that they become.
        streaming: read them as they are asked for instead.
        num_proc: processes that read them.
        options: of the builder.

    Raises:
        UserError: one cannot be read.
    """
    from datasets import load_dataset

    if all(str(each).endswith(".tsv") for group in files.values() for each in group):
        options["sep"] = "\t"
    if not streaming:
        options["num_proc"] = num_proc
    named = {group: [escape(str(Path(each).absolute())) for each in paths] for group, paths in files.items()}
    several = sum(map(len, named.values())) - 1
    first = next(iter(files.values()))[0]
    with reading(f"{first} or one of {several} other files" if several else str(first)):
        read = load_dataset(kind, data_files=named, cache_dir=str(cache), streaming=streaming, **options)
        return {group: resolved(dataset) for group, dataset in read.items()}


def opened(name: str, config: str | None, split: str, cache: Path, streaming: bool = False) -> "Dataset | IterableDataset":
    """One split of a data set.

    Args:
        name: a folder that ``save_to_disk`` wrote, a file or a glob of files, a folder of files, or a name on the Hub.
        config: the configuration, of data sets that have several.

    Raises:
        UserError: there is no such data set or split, or it cannot be read.
    """
    from datasets import DatasetDict, load_dataset, load_from_disk

    folder = Path(name).expanduser()
    with reading(name):
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            found = load_from_disk(str(folder))
            if isinstance(found, DatasetDict):
                one_of("data.split", split, found)
                found = found[split]
            elif split != "train":
                raise UserError(f"data.split: {name} was saved without splits, so all of it is train, not {split!r}")
            return found.to_iterable_dataset(min(SHARDS, len(found))) if streaming else found
        if files := [each for each in sorted(glob(str(folder), recursive=True)) if Path(each).is_file()]:
            if split != "train":
                raise UserError(f"data.split: files have no splits, so all of {name} is train, not {split!r}")
            return files_read(KINDS.get(Path(files[0]).suffix, "text"), {split: files}, cache, streaming)[split]
        where = str(folder.absolute()) if folder.is_dir() else name
        return resolved(load_dataset(where, config, split=split, cache_dir=str(cache), streaming=streaming))


def resolved(dataset: "Dataset | IterableDataset") -> "Dataset | IterableDataset":
    """A data set whose columns are known; for some streams the first rows tell them."""
    return dataset if dataset.features else dataset._resolve_features()


def column(dataset: "Dataset | IterableDataset", option: str, name: str) -> Any:
    """The type of a column.

    Raises:
        UserError: there is no such column.
    """
    if name not in (features := dataset.features):
        there = ", ".join(features)
        raise UserError(f"{option}: the data have no column {name!r}; they have {there}.{did_you_mean(name, features)}")
    return features[name]


def class_names(dataset: "Dataset | IterableDataset", name: str) -> list[str] | None:
    """The names of the classes, if the data say them, whose numbers are the labels; None: each label is the name of a class.

    Raises:
        UserError: the column is missing, or holds no labels.
    """
    from datasets import ClassLabel, Value

    kind = column(dataset, "data.label", name)
    if isinstance(kind, ClassLabel):
        return kind.names
    if not (isinstance(kind, Value) and ("string" in kind.dtype or "int" in kind.dtype)):
        raise UserError(f"data.label: column {name!r} holds no labels, but {kind}")
    return None
