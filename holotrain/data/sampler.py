"""The order of an epoch as a pure function of seed and epoch."""

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

Key = tuple[int, int]
"""(epoch, index): what a data set is asked for, so that it can seed a sample's augmentation by both."""


class EpochBatchSampler(Sampler[list[Key]]):
    """Batches of shuffled keys ``(epoch, index)``.

    The order depends on (seed, epoch) alone: not on the global random state, the number of workers, or where an epoch was
    resumed. Lightning calls ``set_epoch``; a loop of your own should too.

    Args:
        size: samples in the data set.
        batch_size: keys a batch; the last batch is dropped where it would be smaller, unless there is no other.
        seed: of the shuffling.
    """

    def __init__(self, size: int, batch_size: int, seed: int = 0) -> None:
        self.size = size
        self.batch_size = min(batch_size, size)
        self.seed = seed
        self.epoch = 0
        self.start = 0

    @property
    def sampler(self) -> "EpochBatchSampler":
        """Itself: Lightning looks for ``set_epoch`` on a batch sampler's ``sampler``, not on the batch sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is of this epoch; from its first batch, unless it is the epoch to resume in."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def resume(self, epoch: int, start: int) -> None:
        """The next iteration of ``epoch`` begins at its batch number ``start``; later ones begin at 0."""
        self.epoch, self.start = epoch, start

    def __len__(self) -> int:
        return self.size // self.batch_size

    def __iter__(self) -> Iterator[list[Key]]:
        epoch, start, self.start = self.epoch, self.start, 0
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, epoch))
        order = torch.randperm(self.size, generator=generator).tolist()
        for batch in range(start, len(self)):
            first = batch * self.batch_size
            yield [(epoch, index) for index in order[first : first + self.batch_size]]


def mixed_seed(*numbers: int) -> int:
    """One seed of 63 bits from several numbers; near inputs give far seeds (the finaliser of splitmix64)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & (2**64 - 1)
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        state ^= state >> 31
    return state >> 1
