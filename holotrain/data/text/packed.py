"""Joined documents, cut into blocks of equal length without padding, for causal language models: tokenised before training, or
while training reads them, for text that does not fit into memory or on the disk."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import fsspec.asyn
import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from holotrain.data.hub import library_errors
from holotrain.data.sampler import Key, data_shard
from holotrain.data.text.tokenise import Batch, Rows, Tokens, joined, table
from holotrain.data.tokenizers import Tokenizer
from holotrain.errors import UserError
from holotrain.numeric import mixed_seed

ROWS = 16
"""Rows that are read at once."""

WINDOW, BATCHES = 2**22, 64
"""Blocks are shuffled within so many characters of text, or characters for so many batches, if those are more."""

HELD = 2**20
"""Characters of a held-out part that are kept, in memory."""


class PackedBlocks(Dataset):
    """Blocks of ``context + 1`` tokens; inputs are all but the last, targets all but the first.

    With keys ``(epoch, index)``, the first block of each epoch starts at another offset, a function of (seed, epoch). What lies
    before the first block and after the last, less than two blocks in total, is left out in that epoch.
    """

    def __init__(self, tokens: Tokens | np.ndarray, context: int, seed: int) -> None:
        self.tokens, self.context, self.seed = tokens, context, seed
        self.blocks = max((len(tokens) - context) // context, 1)

    def __len__(self) -> int:
        return self.blocks

    def offset(self, epoch: int) -> int:
        """Where the first block of an epoch begins, drawn from all places that leave room for the others."""
        return mixed_seed(self.seed, epoch) % (len(self.tokens) - self.blocks * self.context)

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
        first = self.offset(keys[0][0])
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

    Raises:
        UserError: the rows cannot be read, or hold less than a batch for each worker.
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
