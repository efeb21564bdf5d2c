"""Single documents, each between a start and an end token, padded to the longest of their batch."""

from collections.abc import Sequence

import numpy as np
import torch

from holotrain.data.text.batches import Batch, Batched
from holotrain.data.text.corpus import Corpus
from holotrain.data.text.tokenizer import Tokenizer
from holotrain.errors import UserError

SPECIAL = 2
"""Special tokens of a piece: start and end."""


class Pieces(Batched):
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
        self.corpus, self.multiple, self.numbered = corpus, multiple, numbered
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
        keys = np.asarray(keys)
        bodies = self.lengths[keys] - SPECIAL
        places = np.arange(int(bodies.max()))
        inside = places < bodies[:, None]
        body = self.corpus.tokens[np.where(inside, self.begins[keys, None] + places, 0)]
        batch = framed(body, inside, self.start_id, self.end_id, self.pad_id, self.multiple)
        if self.labels is not None:
            batch["labels"] = torch.from_numpy(self.labels[keys])
        if self.numbered:
            batch["index"] = torch.from_numpy(keys)
        return batch


def framed(body: np.ndarray, inside: np.ndarray, start_id: int, end_id: int, pad_id: int, multiple: int = 1) -> Batch:
    """``tokens`` (B, T) and ``lengths`` (B,): start, body, end, padding.

    Args:
        body: (B, L) ids.
        inside: (B, L) True for the ids that belong to a row, which come first in it.
        multiple: T is rounded up to a multiple of this.
    """
    lengths = inside.sum(1) + SPECIAL
    width = -(-(body.shape[1] + SPECIAL) // multiple) * multiple
    tokens = np.full((len(body), width), pad_id, dtype=np.int64)
    tokens[:, 0] = start_id
    tokens[:, 1 : 1 + body.shape[1]][inside] = body[inside]
    tokens[np.arange(len(body)), lengths - 1] = end_id
    return {"tokens": torch.from_numpy(tokens), "lengths": torch.from_numpy(lengths)}
