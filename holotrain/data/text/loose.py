"""Text files that a user names, to classify or score: in their own order, each row with its name."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holotrain.data.fixed import FixedBatches, in_batches
from holotrain.data.loader import Loader
from holotrain.data.text.batches import Batch, Batched, as_it_is
from holotrain.data.text.readers import ROWS, Reader
from holotrain.data.text.tokenizer import Tokenizer
from holotrain.errors import UserError


class LooseFiles(Batched):
    """Rows of token ids, padded to the longest of their batch: ``tokens`` (B, T), ``lengths`` (B,), ``names`` a list of B.

    Args:
        rows: the ids of each row.
        names: the file of each row; ``FILE:ROW`` for a file that holds many texts.
        pad_id: id of the padding.

    Attributes:
        paths: the names.
        lengths: (N,) int64.
    """

    def __init__(self, rows: Sequence[np.ndarray], names: Sequence[str], pad_id: int) -> None:
        self.rows, self.paths, self.pad_id = rows, list(names), pad_id
        self.lengths = np.array([len(row) for row in rows], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, keys: Sequence[int]) -> Batch:
        lengths = torch.from_numpy(self.lengths[keys])
        tokens = torch.full((len(keys), int(lengths.max())), self.pad_id)
        for row, key in zip(tokens, keys, strict=True):
            row[: self.lengths[key]] = torch.from_numpy(self.rows[key])
        return {"tokens": tokens, "lengths": lengths, "names": [self.paths[key] for key in keys]}


def texts_at(path: Path, text: str = "text") -> list[tuple[str, str]]:
    """Name and text of the file at a path, or of all files below it; for .jsonl and .parquet, of each row.

    Args:
        text: field or column that holds the text, in .jsonl and .parquet.

    Raises:
        UserError: there is no file, or one cannot be read.
    """
    if not path.exists():
        raise UserError(f"texts: there is no file or folder {path}")
    paths = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    reader, found = Reader(text=text), []
    for each in paths:
        try:
            texts = [text for text, _ in reader.documents(each)]
        except UserError as error:  # whose advice is for data
            raise UserError(f"texts: {str(error).removeprefix('data: ').partition('; data.on_error')[0]}") from error
        rows = each.suffix in ROWS
        found += [(f"{each}:{number}" if rows else str(each), text) for number, text in enumerate(texts, 1)]
    if not found:
        raise UserError(f"texts: there is no text in {path}")
    return found


def scored_rows(ids: np.ndarray, context: int, tokenizer: Tokenizer) -> list[np.ndarray]:
    """A text as packed blocks of at most ``context + 1`` tokens, with an end token before and after. All of it is a target."""
    whole = np.concatenate([[tokenizer.end_id], ids, [tokenizer.end_id]]).astype(np.int64)
    return [whole[first : first + context + 1] for first in range(0, len(whole) - 1, context)]


def framed_rows(ids: np.ndarray, context: int, tokenizer: Tokenizer) -> list[np.ndarray]:
    """A text between start and end token, cut short to ``context`` tokens."""
    return [np.concatenate([[tokenizer.start_id], ids[: context - 2], [tokenizer.end_id]]).astype(np.int64)]


def text_files(
    path: Path, tokenizer: Tokenizer, context: int, packed: bool, batch_size: int, text: str = "text", **loading: Any
) -> Loader:
    """Text files, each a document, sorted by name: ``tokens`` (B, T), ``lengths`` (B,), ``names``.

    Args:
        path: a file or a folder; in .jsonl and .parquet each row is a document, named ``FILE:ROW``.
        context: tokens that the model sees.
        packed: all tokens of a text are targets, in blocks of at most ``context + 1``; False: a text is cut short, as for
            classification.
        text: field or column that holds the text, in .jsonl and .parquet.
        loading: options of DataLoader, such as ``num_workers``.

    Raises:
        UserError: there is no text at ``path``, or it cannot be read.
    """
    cut = scored_rows if packed else framed_rows
    rows, names = [], []
    for name, written in texts_at(path, text):
        cuts = cut(tokenizer.encode(written), context, tokenizer)
        rows += cuts
        names += [name] * len(cuts)
    files = LooseFiles(rows, names, tokenizer.pad_id)
    return Loader(files, batch_sampler=FixedBatches(in_batches(len(rows), batch_size)), collate_fn=as_it_is, **loading)
