"""Single documents, each between a start and an end token, padded to the longest of their batch."""

from collections.abc import Sequence

import numpy as np
import torch
from torch.utils.data import Dataset

from holotrain.data.text.tokenise import Batch, Corpus
from holotrain.data.tokenizers.tokenizer import Tokenizer
from holotrain.errors import UserError

SPECIAL = 2
"""Special tokens of a piece: start and end."""


class Pieces(Dataset):
    """Documents of at most ``context`` tokens.

    Batches are ``tokens`` (B, T) int64, padded with the pad token to the longest, ``lengths`` (B,) int64, and for
    classification ``labels`` (B,) int64.

    Args:
        corpus: the part.
        tokenizer: gives the special tokens.
        context: maximum number of tokens, including start and end. Longer documents are cut into pieces; for classification
            they are cut short.
        classified: return labels, and leave out documents without one.
        multiple: T is rounded up to a multiple of this.
        numbered: also return ``index`` (B,), the number of each document in the part.

    Attributes:
        lengths: (N,) int64, tokens of each piece, including start and end.

    Raises:
        UserError: no document of the part has a label.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Tokenizer,
        context: int,
        classified: bool = False,
        multiple: int = 1,
        numbered: bool = False,
    ) -> None:
        self.tokens, self.multiple, self.numbered = corpus.tokens, multiple, numbered
        self.start_id, self.end_id, self.pad_id = tokenizer.start_id, tokenizer.end_id, tokenizer.pad_id
        body = context - SPECIAL
        begins, ends = np.asarray(corpus.offsets[:-1]), np.asarray(corpus.offsets[1:]) - 1  # the end token is ours to give
        self.labels = None
        if classified:
            chosen = np.flatnonzero(corpus.labels >= 0)
            if not len(chosen):
                raise UserError(f"data: no document of the {corpus.part} part has a label")
            self.labels = np.asarray(corpus.labels)[chosen]
            self.begins = begins[chosen]
            self.lengths = np.minimum(ends[chosen] - self.begins, body) + SPECIAL
        else:
            counts = np.maximum(-(-(ends - begins) // body), 1)
            place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            self.begins = np.repeat(begins, counts) + place * body
            self.lengths = np.minimum(np.repeat(ends, counts) - self.begins, body) + SPECIAL

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitems__(self, keys: Sequence[int]) -> Batch:
        lengths = self.lengths[keys]
        tokens = np.full((len(keys), -(-lengths.max() // self.multiple) * self.multiple), self.pad_id)
        tokens[:, 0] = self.start_id
        tokens[np.arange(len(keys)), lengths - 1] = self.end_id
        for row, begin, body in zip(tokens, self.begins[keys].tolist(), (lengths - SPECIAL).tolist(), strict=True):
            row[1 : body + 1] = self.tokens[begin : begin + body]
        batch = {"tokens": torch.from_numpy(tokens), "lengths": torch.from_numpy(lengths)}
        if self.labels is not None:
            batch["labels"] = torch.from_numpy(self.labels[keys])
        if self.numbered:
            batch["index"] = torch.tensor(keys)
        return batch
