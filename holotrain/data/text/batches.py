"""From tokens to batches, in two layouts: blocks of joined documents, and single documents of similar length."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import fsspec.asyn
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from holotrain.data.hub import library_errors
from holotrain.data.sampler import Key, ResumableBatchSampler, data_shard, halved
from holotrain.data.text.tokenise import Batch, Corpus, Rows, Tokens, joined, table
from holotrain.data.tokenizers import Tokenizer
from holotrain.errors import UserError
from holotrain.numeric import counted, mixed_seed, require_at_least

ROWS = 16
"""Rows that are read at once."""

WINDOW, BATCHES = 2**22, 64
"""Blocks are shuffled within so many characters of text, or characters for so many batches, if those are more."""

HELD = 2**20
"""Characters of a held-out part that are kept, in memory."""


class PackedBlocks(Dataset):
    """Blocks of ``context + 1`` tokens; inputs are all but the last, targets all but the first.

    With keys ``(epoch, index)``, the first block of each epoch starts at another offset, drawn with (seed, epoch) from all that
    leave room for the blocks. What lies before the first and after the last, less than two blocks in total, is left out.
    """

    def __init__(self, tokens: Tokens | np.ndarray, context: int, seed: int) -> None:
        self.tokens, self.context, self.seed = tokens, context, seed
        self.blocks = max((len(tokens) - context) // context, 1)

    def __len__(self) -> int:
        return self.blocks

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
        epoch = keys[0][0]
        first = mixed_seed(self.seed, epoch) % (len(self.tokens) - self.blocks * self.context)
        return gathered(self.tokens, [first + index * self.context for _, index in keys], self.context + 1)


class PackedInOrder(Dataset):
    """The blocks of a part from its first token to its last. Every token except the first is a target exactly once.

    The last block may be shorter; ``batches`` puts it into a batch of its own.
    """

    def __init__(self, tokens: Tokens, context: int) -> None:
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        return -(-(len(self.tokens) - 1) // self.context)

    def batches(self, batch_size: int) -> list[np.ndarray]:
        """All blocks in order, ``batch_size`` in each batch."""
        full = (len(self.tokens) - 1) // self.context
        cuts = [*range(0, full, batch_size), full, len(self)]
        return [np.arange(first, last) for first, last in pairwise(cuts) if first < last]

    def __getitems__(self, keys: Sequence[int]) -> Batch:
        length = min(self.context + 1, len(self.tokens) - max(keys) * self.context)
        return gathered(self.tokens, [key * self.context for key in keys], length)


def gathered(tokens: Tokens | np.ndarray, starts: Sequence[int], length: int) -> Batch:
    """``tokens`` (B, length) int64, beginning at each start (B,)."""
    blocks = [tokens[start : start + length] for start in starts]
    return {"tokens": torch.from_numpy(np.concatenate(blocks, dtype=np.int64).reshape(-1, length))}


class PackedStream(IterableDataset):
    """Endless batches of packed blocks: ``tokens`` (B, context + 1) int64.

    The rows are divided among processes and their workers with ``split_dataset_by_node``. Each reads a window of text, cuts its
    tokens into blocks, shuffles them, and goes on with the next window; what does not fill a batch is left out. Each pass
    through the rows takes their shards in another order. The state is the library's at the beginning of the window, and the
    number of batches taken from it, so a resumed stream reads that window again.

    """

    def __init__(self, rows: Sequence[Rows], tokenizer: Tokenizer, context: int, batch_size: int, seed: int) -> None:
        self.rows, self.tokenizer, self.context, self.batch_size, self.seed = rows, tokenizer, context, batch_size, seed
        self.window = max(WINDOW, BATCHES * batch_size * context)
        self.data_shard = data_shard()
        self._state: dict[str, Any] = {"pass": 0, "rows": 0, "source": None, "window": 0, "batch": 0}

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = dict(state)

    def __iter__(self) -> Iterator[Batch]:
        from datasets.distributed import split_dataset_by_node

        fsspec.asyn.reset_lock()  # of the process that a worker was forked from; files of the Hub would wait for it
        worker = get_worker_info()
        workers, number = (1, 0) if worker is None else (worker.num_workers, worker.id)
        node, nodes = self.data_shard[0] * workers + number, self.data_shard[1] * workers
        sources = [replace(rows, dataset=split_dataset_by_node(rows.dataset, node, nodes)) for rows in self.rows]
        while True:
            state, before = self._state, self._state["window"]
            for place in range(state["rows"], len(sources)):
                yield from self._of(sources[place], place, node)
            if self._state["window"] == before == 0:
                raise UserError("data.batch_size: some process or worker has less than a batch of the training text")
            self._state |= {"pass": self._state["pass"] + 1, "rows": 0}

    def _of(self, rows: Rows, place: int, node: int) -> Iterator[Batch]:
        """Batches of the rest of the current pass through some rows."""
        state = self._state
        rows.dataset.set_epoch(mixed_seed(self.seed, state["pass"]) % 2**31)
        if state["rows"] == place and state["source"] is not None:
            rows.dataset.load_state_dict(state["source"])
        state["rows"] = place
        batches = rows.batches("train", ROWS)
        while texts := taken(batches, self.window):
            tokens, _ = joined(self.tokenizer, texts)
            seed = mixed_seed(self.seed, node, state["pass"], state["window"])
            blocks = PackedBlocks(tokens, self.context, seed)
            count = len(blocks) if len(tokens) > self.context else 0
            order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
            for batch in range(state["batch"], count // self.batch_size):
                state["batch"] = batch + 1
                yield blocks.__getitems__([(0, each) for each in order[batch * self.batch_size :][: self.batch_size]])
            state["window"] += count >= self.batch_size
            state["batch"], state["source"] = 0, rows.dataset.state_dict()
        state["source"] = None


def held_out_of(rows: Sequence[Rows], part: str, tokenizer: Tokenizer) -> Any:
    """The first documents of a held-out part, about ``HELD`` characters, as a data set in memory."""
    from datasets import Dataset as Table

    texts = taken(chain.from_iterable(each.batches(part, ROWS) for each in rows if each.may_be_in(part)), HELD)
    with library_errors("the text"):
        return Table(table(*joined(tokenizer, texts), [None] * len(texts)))


def taken(batches: Iterator[list[str]], size: int) -> list[str]:
    """The next texts, until they have ``size`` characters; [] at the end."""
    texts: list[str] = []
    while size > 0 and (batch := next(batches, None)) is not None:
        texts += batch
        size -= sum(map(len, batch))
    return texts


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

    Documents are shuffled within buckets of similar length, each bucket is cut into batches, and the batches are shuffled, by
    (seed, epoch). Documents that do not fill a batch go into the next longer bucket, so only the last batch is smaller, and
    every epoch has as many batches.

    Every document comes once per epoch, in one process. Until the number of batches is divisible by that of the processes, the
    largest are halved; if all hold one document, the remainder is left out, another one in each epoch. At each step all
    processes have batches of similar length, so none waits for the others.

    It is the ``batch_sampler`` of any DataLoader; :func:`padded_batch` is the collate function.

    Args:
        lengths: (N,) tokens of each document, as a list or an array.
        batch_size: documents in a batch, without ``max_tokens``.
        max_tokens: ``(longest in the batch) * (documents) <= max_tokens``. A longer document raises a UserError.
        bucketing: False puts documents of all lengths into one bucket.
        seed: of the order.
        shard: index of this process's share and number of shares; None: of the process group, if there is one.

    Raises:
        ValueError: ``lengths`` are not whole numbers of at least 0, or ``batch_size`` is below 1.
        UserError: a document is longer than ``max_tokens``, or there are fewer documents than processes.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        batch_size: int = 1,
        max_tokens: int | None = None,
        bucketing: bool = True,
        seed: int = 0,
        shard: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(seed, shard)
        require_at_least(1, batch_size=batch_size)
        self.lengths = whole_numbers(lengths)
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

    def _batch_sizes(self, batch_size: int, max_tokens: int | None) -> np.ndarray:
        """Number of documents in each batch, from the shortest to the longest."""
        if max_tokens is not None and (most := self.lengths.max()) > max_tokens:
            raise UserError(f"data.max_tokens: {max_tokens} is out of range; the longest document has {most} tokens")
        members = np.bincount(self._bucket)
        longest = np.zeros(len(members), dtype=np.int64)
        np.maximum.at(longest, self._bucket, self.lengths)
        sizes, left = [], 0
        for count, width in zip(members.tolist(), longest.tolist(), strict=True):
            capacity = batch_size if max_tokens is None else max_tokens // max(width, 1)
            full, left = divmod(left + count, capacity)
            sizes += [capacity] * full
        sizes = halved([*sizes, left] if left else sizes, self.world_size)
        return np.array(sizes[: len(sizes) // self.world_size * self.world_size], dtype=np.int64)


def whole_numbers(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Lengths as (N,) int64. Raises a ValueError unless they are whole numbers of at least 0."""
    numbers = np.asarray(lengths)
    if numbers.ndim != 1 or (numbers.size and (numbers.dtype.kind not in "iu" or numbers.min() < 0)):
        raise ValueError("lengths must be a list of whole numbers of at least 0, one for each document")
    return numbers.astype(np.int64)


def bucket_of(lengths: np.ndarray) -> np.ndarray:
    """The bucket (N,) of each length. Buckets are one token wide at first, then grow by a factor of ``GROWTH``."""
    edges = [0]
    while edges[-1] <= lengths.max():
        edges.append(max(edges[-1] + 1, int(edges[-1] * GROWTH)))
    return np.searchsorted(edges, lengths, side="right") - 1


IGNORED = -100
"""The label of padding: the ``ignore_index`` of PyTorch's cross entropy."""


def padded_batch(samples: Sequence[Mapping[str, Any]], pad_id: int = 0, multiple: int = 1) -> Batch:
    """Collate function for token lists: ``DataLoader(..., collate_fn=padded_batch)``, or a ``functools.partial`` of it.

    Args:
        samples: each has ``input_ids``, its tokens, and may have ``labels``: one for each token, or one class. Lists, arrays
            or tensors of whole numbers. All have labels, or none.
        pad_id: the token that fills up.
        multiple: T, the length of the longest sample, is rounded up to a multiple of this.

    Returns:
        ``input_ids`` (B, T); ``attention_mask`` (B, T), 1 for tokens and 0 for padding; ``lengths`` (B,); and ``labels``,
        (B, T) with -100 for padding, or (B,) for classes.

    Raises:
        ValueError: a sample has another number of labels than of tokens.
    """
    require_at_least(1, multiple=multiple)
    rows = [torch.as_tensor(sample["input_ids"]) for sample in samples]
    lengths = torch.tensor([len(row) for row in rows])
    width = -(-int(lengths.max()) // multiple) * multiple
    mask = (torch.arange(width) < lengths[:, None]).long()
    batch = {"input_ids": filled_up(rows, width, pad_id), "attention_mask": mask, "lengths": lengths}
    if any("labels" in sample for sample in samples):
        labels = [torch.as_tensor(sample["labels"]) for sample in samples]
        if any(each.ndim for each in labels) and any(a.shape != b.shape for a, b in zip(labels, rows, strict=True)):
            raise ValueError("labels: there must be one for each token, or in all samples one for the sample")
        batch["labels"] = filled_up(labels, width, IGNORED) if labels[0].ndim else torch.stack(labels)
    return batch


def filled_up(rows: Sequence[Tensor], width: int, value: int) -> Tensor:
    """Rows of different lengths as one tensor (B, width), filled up with ``value``."""
    longest = pad_sequence([*rows], batch_first=True, padding_value=value)
    return F.pad(longest, (0, width - longest.shape[1]), value=value)


def padded(lengths: np.ndarray, multiple: int) -> np.ndarray:
    """Lengths rounded up to a multiple."""
    return -(-np.asarray(lengths, dtype=np.int64) // multiple) * multiple
