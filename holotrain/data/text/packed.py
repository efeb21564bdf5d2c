"""Joined documents, cut into blocks of equal length without padding, for causal language models."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from holotrain.data.sampler import Key, mixed_seed
from holotrain.data.text.batches import Batch, Batched
from holotrain.data.text.corpus import Corpus
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
        targets = len(corpus.tokens) - 1
        if targets < context:
            raise UserError(
                f"data.context: {context} is out of range; the {corpus.part} part has {targets + 1} tokens: {targets} at most"
            )
        self.corpus, self.context, self.seed = corpus, context, seed
        self._blocks = max((targets - context + 1) // context, 1)
        self._offsets = targets - self._blocks * context + 1

    def __len__(self) -> int:
        return self._blocks

    def offset(self, epoch: int) -> int:
        """The offset of the first block of an epoch."""
        return mixed_seed(self.seed, epoch) % self._offsets

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
        epoch = keys[0][0]
        index = np.array([index for _, index in keys])
        return gathered(self.corpus, self.offset(epoch) + index * self.context, self.context + 1)


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
        starts = np.array(keys) * self.context
        length = min(self.context + 1, len(self.corpus.tokens) - int(starts.max()))
        return gathered(self.corpus, starts, length)


def gathered(corpus: Corpus, starts: np.ndarray, length: int) -> Batch:
    """``tokens`` (B, length) int64, beginning at each start (B,)."""
    return {"tokens": torch.from_numpy(corpus.tokens[starts[:, None] + np.arange(length)].astype(np.int64))}
