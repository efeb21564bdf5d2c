"""Joined documents, cut into blocks of equal length without padding, for causal language models."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from holotrain.data.sampler import Key, mixed_seed
from holotrain.data.text.batches import Batch, Batched
from holotrain.data.text.corpus import Corpus, Tokens
from holotrain.errors import UserError


class PackedBlocks(Batched):
    """Blocks of ``context + 1`` tokens; inputs are all but the last, targets all but the first.

    With training keys ``(epoch, index)``, the first block of each epoch starts at another offset, a function of (seed, epoch).
    What lies before the first block and after the last, less than two blocks in total, is left out in that epoch.

    Args:
        corpus: the part.
        context: tokens that a model sees.
        seed: for the offsets.

    Raises:
        UserError: the corpus is shorter than one block.
    """

    def __init__(self, corpus: Corpus, context: int, seed: int = 0) -> None:
        self.corpus, self.context, self.seed = corpus, context, seed
        if len(corpus.tokens) <= context:
            there = f"the {corpus.part} part has {len(corpus.tokens)} tokens: {len(corpus.tokens) - 1} at most"
            raise UserError(f"data.context: {context} is out of range; {there}")

    def __len__(self) -> int:
        return blocks_in(len(self.corpus.tokens), self.context)

    def offset(self, epoch: int) -> int:
        """The offset of the first block of an epoch."""
        return offset_of(len(self.corpus.tokens), self.context, self.seed, epoch)

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
        first = self.offset(keys[0][0])
        return gathered(self.corpus.tokens, [first + index * self.context for _, index in keys], self.context + 1)


class PackedInOrder(Batched):
    """The blocks of a part from its first token to its last. Every token except the first is a target exactly once.

    The last block may be shorter; ``batches`` puts it into a batch of its own.

    Args:
        corpus: the part.
        context: tokens that a model sees.
    """

    def __init__(self, corpus: Corpus, context: int) -> None:
        self.corpus, self.context = corpus, context

    def __len__(self) -> int:
        return -(-(len(self.corpus.tokens) - 1) // self.context)

    def batches(self, batch_size: int) -> list[np.ndarray]:
        """All blocks in order, ``batch_size`` in each batch."""
        full = (len(self.corpus.tokens) - 1) // self.context
        cuts = [*range(0, full, batch_size), full, len(self)]
        return [np.arange(first, last) for first, last in pairwise(cuts) if first < last]

    def __getitems__(self, keys: Sequence[int]) -> Batch:
        length = min(self.context + 1, len(self.corpus.tokens) - max(keys) * self.context)
        return gathered(self.corpus.tokens, [key * self.context for key in keys], length)


def blocks_in(tokens: int, context: int) -> int:
    """How many blocks are cut from so many tokens, wherever the first begins; there must be enough for one."""
    return max((tokens - context) // context, 1)


def offset_of(tokens: int, context: int, *seeds: int) -> int:
    """Where the first of those blocks begins, drawn from all places that leave room for them."""
    return mixed_seed(*seeds) % (tokens - blocks_in(tokens, context) * context)


def gathered(tokens: Tokens | np.ndarray, starts: Sequence[int], length: int) -> Batch:
    """``tokens`` (B, length) int64, beginning at each start (B,)."""
    return {"tokens": torch.from_numpy(np.stack([tokens[start : start + length] for start in starts]).astype(np.int64))}
