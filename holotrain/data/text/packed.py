"""Joined documents, cut into blocks of equal length without padding, for causal language models."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch.utils.data import Dataset

from holotrain.data.sampler import Key, mixed_seed
from holotrain.data.text.corpus import Batch, Tokens


class PackedBlocks(Dataset):
    """Blocks of ``context + 1`` tokens; inputs are all but the last, targets all but the first.

    With keys ``(epoch, index)``, the first block of each epoch starts at another offset, a function of (seed, epoch). What lies
    before the first block and after the last, less than two blocks in total, is left out in that epoch.

    Args:
        tokens: more than ``context``.
        context: tokens that a model sees.
        seed: for the offsets.
    """

    def __init__(self, tokens: Tokens | np.ndarray, context: int, seed: int = 0) -> None:
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

    Args:
        tokens: of the part.
        context: tokens that a model sees.
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
