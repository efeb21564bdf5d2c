"""Text files that a user names, to be classified or scored: in their own order, each row with its name."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from holotrain.data.text.batches import Batch, Batched
from holotrain.data.text.readers import ROWS, Reader
from holotrain.data.text.tokenizer import Tokenizer
from holotrain.errors import UserError


class LooseFiles(Batched):
    """Rows of token ids, padded to the longest of their batch: ``tokens`` (B, T), ``lengths`` (B,), ``names`` a list of B.

    Args:
        rows: ids of each.
        names: the file each is of, one after another; a file of rows gives ``FILE:ROW``.
        pad_id: fills.
        multiple: T is rounded up to a multiple of it.

    Attributes:
        paths: the names.
        lengths: (N,) int64.
    """

    def __init__(self, rows: Sequence[np.ndarray], names: Sequence[str], pad_id: int, multiple: int = 1) -> None:
        self.rows, self.paths, self.pad_id, self.multiple = rows, list(names), pad_id, multiple
        self.lengths = np.array([len(row) for row in rows], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, keys: Sequence[int]) -> Batch:
        lengths = torch.from_numpy(self.lengths[keys])
        width = -(-int(lengths.max()) // self.multiple) * self.multiple
        tokens = torch.full((len(keys), width), self.pad_id)
        for row, key in zip(tokens, keys, strict=True):
            row[: self.lengths[key]] = torch.from_numpy(self.rows[key])
        return {"tokens": tokens, "lengths": lengths, "names": [self.paths[key] for key in keys]}


def texts_at(path: Path, text: str = "text") -> list[tuple[str, str]]:
    """The file at a path, or all files below it: name and text of each; of files of rows, of each row.

    Args:
        text: field or column that holds the text, of files of rows.

    Raises:
        UserError: there is none, or one cannot be read.
    """
    if not path.exists():
        raise UserError(f"texts: there is no file or folder {path}")
    paths = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    reader, found = Reader(text=text), []
    for each in paths:
        texts = [text for text, _ in reader.documents(each)]
        rows = each.suffix in ROWS
        found += [(f"{each}:{number}" if rows else str(each), text) for number, text in enumerate(texts, 1)]
    if not found:
        raise UserError(f"texts: there is no text in {path}")
    return found


def scored_rows(ids: np.ndarray, context: int, tokenizer: Tokenizer) -> list[np.ndarray]:
    """A text as packed blocks of at most ``context + 1`` tokens, an end token before and after it: all of it is a target."""
    whole = np.concatenate([[tokenizer.end_id], ids, [tokenizer.end_id]]).astype(np.int64)
    return [whole[first : first + context + 1] for first in range(0, len(whole) - 1, context)]


def framed_rows(ids: np.ndarray, context: int, tokenizer: Tokenizer, classified: bool) -> list[np.ndarray]:
    """A text as pieces of at most ``context`` tokens with start and end; where it is classified, the first alone."""
    body = context - 2
    firsts = [0] if classified else range(0, max(len(ids), 1), body)
    pieces = (ids[first : first + body] for first in firsts)
    return [np.concatenate([[tokenizer.start_id], piece, [tokenizer.end_id]]).astype(np.int64) for piece in pieces]
