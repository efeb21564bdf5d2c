"""Text files that a user names, to classify or score: in their own order, each row with its name."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from holotrain.data.hub import KINDS
from holotrain.data.loader import Loader
from holotrain.data.text.files import TextFile, rows_of
from holotrain.data.text.tokenise import Batch, Reading, as_it_is
from holotrain.data.tokenizers.tokenizer import Tokenizer
from holotrain.errors import UserError


class LooseFiles(Dataset):
    """Rows of token ids, padded to the longest of their batch: ``tokens`` (B, T), ``lengths`` (B,), ``names`` a list of B.

    Attributes:
        paths: the file of each row; ``FILE:ROW``, counted from 1, for a file that holds many texts.
    """

    def __init__(self, rows: Sequence[np.ndarray], names: Sequence[str], pad_id: int) -> None:
        self.rows, self.paths, self.pad_id = rows, list(names), pad_id

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, keys: Sequence[int]) -> Batch:
        rows = [torch.from_numpy(self.rows[key]) for key in keys]
        tokens = pad_sequence(rows, batch_first=True, padding_value=self.pad_id)
        return {"tokens": tokens, "lengths": torch.tensor([*map(len, rows)]), "names": [self.paths[key] for key in keys]}


def texts_at(path: Path, text: str = "text") -> list[tuple[str, str]]:
    """Name and text of the file at a path, or of all files below it; for files of rows, of each row that is not blank.

    Args:
        text: column that holds the text, in files of rows.

    Raises:
        UserError: there is no file, or one cannot be read.
    """
    if not path.exists():
        raise UserError(f"texts: there is no file or folder {path}")
    found = []
    for each in [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file()):
        try:
            with TemporaryDirectory() as cache:  # the library keeps its locks there
                (rows,) = rows_of([TextFile(each, each.name, "test")], Reading(text=text), Path(cache), streaming=True)
                numbered = [(number, one) for number, row in enumerate(rows.batches("test", 1), 1) for one in row]
        except UserError as error:  # whose advice is for data
            raise UserError(f"texts: {str(error).removeprefix('data: ').partition('; data.on_error')[0]}") from error
        several = each.suffix in KINDS
        found += [(f"{each}:{number}" if several else str(each), one) for number, one in numbered]
    if not found:
        raise UserError(f"texts: there is no text in {path}")
    return found


def text_files(
    path: Path, tokenizer: Tokenizer, context: int, packed: bool, batch_size: int, text: str = "text", **loading: Any
) -> Loader:
    """Text files, each a document, sorted by name: ``tokens`` (B, T), ``lengths`` (B,), ``names``.

    Args:
        path: a file or a folder; in files of rows each row is a document, named ``FILE:ROW``.
        context: tokens that the model sees.
        packed: all tokens of a text are targets, in blocks of at most ``context + 1`` that begin with an end token; False: a
            text is cut short between start and end token, as for classification.
        text: column that holds the text, in files of rows.
        loading: options of DataLoader, such as ``num_workers``.

    Raises:
        UserError: there is no text at ``path``, or it cannot be read.
    """
    end, rows, names = tokenizer.end_id, [], []
    for name, written in texts_at(path, text):
        ids = tokenizer.encode(written)
        if packed:
            whole = np.concatenate([[end], ids, [end]])
            cuts = [whole[first : first + context + 1] for first in range(0, len(whole) - 1, context)]
        else:
            cuts = [np.concatenate([[tokenizer.start_id], ids[: context - 2], [end]])]
        rows += cuts
        names += [name] * len(cuts)
    return Loader(LooseFiles(rows, names, tokenizer.pad_id), batch_size, collate_fn=as_it_is, **loading)
