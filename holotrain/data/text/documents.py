"""Single documents, each between a start and an end token, in batches of similar length, so that there is little padding."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import Dataset

from holotrain.data.sampler import ResumableBatchSampler, in_batches
from holotrain.data.text.tokenise import Batch, Corpus
from holotrain.data.tokenizers import Tokenizer
from holotrain.errors import UserError
from holotrain.numeric import counted, mixed_seed

SPECIAL = 2
"""Special tokens of a piece: start and end."""


class Pieces(Dataset):
    """Documents of at most ``context`` tokens; if the part has classes, those with a label, for classification.

    Batches are ``tokens`` (B, T) int64, padded with the pad token to the longest, ``lengths`` (B,) int64, and for
    classification ``labels`` (B,) int64.

    Args:
        context: maximum number of tokens, including start and end. Longer documents are cut into pieces; for classification
            they are cut short.
        multiple: T is rounded up to a multiple of this.
        numbered: also return ``index`` (B,), the number of each document in the part.

    Attributes:
        lengths: (N,) int64, tokens of each piece, including start and end.

    Raises:
        UserError: no document of the part has a label.
    """

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, context: int, multiple: int, numbered: bool) -> None:
        self.tokens, self.multiple, self.numbered = corpus.tokens, multiple, numbered
        self.start_id, self.end_id, self.pad_id = tokenizer.start_id, tokenizer.end_id, tokenizer.pad_id
        body = context - SPECIAL
        begins, ends = np.asarray(corpus.offsets[:-1]), np.asarray(corpus.offsets[1:]) - 1  # the end token is ours to give
        self.labels = None
        if corpus.labels is not None:
            chosen = corpus.labels >= 0
            if not chosen.any():
                raise UserError(f"data: no document of the {corpus.part} part has a label")
            self.labels, begins, ends = corpus.labels[chosen], begins[chosen], ends[chosen]
        else:
            counts = np.maximum(-(-(ends - begins) // body), 1)
            place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            begins, ends = np.repeat(begins, counts) + place * body, np.repeat(ends, counts)
        self.begins = begins
        self.lengths = np.minimum(ends - begins, body) + SPECIAL

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


GROWTH = 1.1
"""The longest document of a bucket is at most this many times as long as the shortest (or one token longer)."""


class BucketBatchSampler(ResumableBatchSampler):
    """Batches of shuffled indices; the documents of a batch have similar lengths.

    Documents are shuffled within buckets of similar length, each bucket is cut into batches, and the batches are shuffled. All
    of this is a function of (seed, epoch). Documents that do not fill a batch go first into the next longer bucket, so only the
    last batch of the longest bucket is smaller. The number of batches depends on the lengths only, so every epoch has as many.

    Every document comes exactly once per epoch, in one process. If the number of batches is not divisible by the number of
    processes, the largest batches are halved until it is. (If all batches hold one document, the remainder is left out, a
    different one in each epoch.) At each step all processes have batches of similar length, so none waits for the others.

    Args:
        lengths: (N,) tokens of each document.
        batch_size: documents in a batch; or
        max_tokens: ``(longest in the batch) * (documents) <= max_tokens``.
        bucketing: False puts documents of all lengths into one bucket.
        seed, shard: see :class:`~holotrain.data.sampler.ResumableBatchSampler`.

    Raises:
        UserError: a document is longer than ``max_tokens``, or there are fewer documents than processes.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        bucketing: bool = True,
        seed: int = 0,
        shard: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(seed, shard)
        self.lengths = np.asarray(lengths, dtype=np.int64)
        if len(self.lengths) < self.world_size:
            raise UserError(f"data: {counted(len(self.lengths), 'document')} cannot be split among {self.world_size} processes")
        self._bucket = bucket_of(self.lengths) if bucketing else np.zeros(len(self.lengths), dtype=np.int64)
        self._sizes = self._batch_sizes(batch_size, max_tokens)

    def __len__(self) -> int:
        return len(self._sizes) // self.world_size

    def epoch_batches(self, epoch: int) -> list[np.ndarray]:
        """The batches of all processes, sorted by length; each step takes ``world_size`` consecutive ones."""
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, epoch))
        order = torch.randperm(len(self.lengths), generator=generator).numpy()
        order = order[: self._sizes.sum()]
        order = order[np.argsort(self._bucket[order], kind="stable")]
        return np.split(order, np.cumsum(self._sizes)[:-1])

    def batches(self, epoch: int, start: int) -> Iterator[list[int]]:
        batches = self.epoch_batches(epoch)
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, epoch, 1))
        for step in torch.randperm(len(self), generator=generator)[start:].tolist():
            yield batches[step * self.world_size + self.rank].tolist()

    def _batch_sizes(self, batch_size: int | None, max_tokens: int | None) -> np.ndarray:
        """Number of documents in each batch, from the shortest to the longest."""
        members = np.bincount(self._bucket)
        longest = np.zeros(len(members), dtype=np.int64)
        np.maximum.at(longest, self._bucket, self.lengths)
        sizes, left = [], 0
        for count, capacity in zip(members.tolist(), capacities(longest, batch_size, max_tokens).tolist(), strict=True):
            full, left = divmod(left + count, capacity)
            sizes += [capacity] * full
        sizes += [left] if left else []
        while len(sizes) % self.world_size:
            largest = max(range(len(sizes)), key=sizes.__getitem__)
            if sizes[largest] == 1:
                del sizes[-(len(sizes) % self.world_size) :]
                break
            half = sizes[largest] // 2
            sizes[largest : largest + 1] = [half, sizes[largest] - half]
        return np.array(sizes, dtype=np.int64)


def bucket_of(lengths: np.ndarray) -> np.ndarray:
    """The bucket (N,) of each length. Buckets are one token wide at first, then grow by a factor of ``GROWTH``."""
    edges = [0]
    while edges[-1] <= lengths.max():
        edges.append(max(edges[-1] + 1, int(edges[-1] * GROWTH)))
    return np.searchsorted(edges, lengths, side="right") - 1


def capacities(longest: np.ndarray, batch_size: int | None, max_tokens: int | None) -> np.ndarray:
    """How many documents a batch may hold, given the tokens of its longest document.

    Raises:
        UserError: a document does not fit into ``max_tokens``.
    """
    if max_tokens is None:
        assert batch_size is not None, "batches are bounded by documents or by tokens"
        return np.full(len(longest), batch_size)
    if longest.max() > max_tokens:
        raise UserError(f"data.max_tokens: {max_tokens} is out of range; the longest document has {longest.max()} tokens")
    return max_tokens // np.maximum(longest, 1)


def by_length(lengths: np.ndarray, batch_size: int, max_tokens: int | None) -> list[np.ndarray]:
    """All documents from the shortest to the longest, for evaluation, as many in a batch as ``batch_size`` or ``max_tokens``
    allow. The batches are always the same.

    Raises:
        UserError: a document does not fit into ``max_tokens``.
    """
    order = np.argsort(lengths, kind="stable")
    if max_tokens is None:
        return in_batches(order, batch_size)
    capacities(lengths, None, max_tokens)
    batches = []
    while len(order):
        widths = lengths[order[: max_tokens // max(int(lengths[order[0]]), 1)]]
        count = np.searchsorted(widths * np.arange(1, len(widths) + 1), max_tokens, side="right")
        batches.append(order[:count])
        order = order[count:]
    return batches


def padded(lengths: np.ndarray, multiple: int) -> np.ndarray:
    """Lengths rounded up to a multiple."""
    return -(-np.asarray(lengths, dtype=np.int64) // multiple) * multiple


def padding(sampler: BucketBatchSampler, lengths: np.ndarray) -> float:
    """The share of padding among the tokens of an epoch's batches. ``lengths`` (N,) are those before padding."""
    batches = sampler.epoch_batches(0)
    tokens = sum(int(sampler.lengths[batch].max()) * len(batch) for batch in batches)
    return 1 - int(np.sum(lengths)) / tokens
