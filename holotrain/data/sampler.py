"""The order of an epoch as a pure function of seed and epoch."""

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from holotrain.errors import UserError
from holotrain.ranks.share import share
from holotrain.seeds import mixed_seed

Key = tuple[int, int]
"""(epoch, index): what a data set is asked for, so that it can seed a sample's augmentation by both."""


def process_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Which share of how many this process reads: as given, or where None as :func:`holotrain.ranks.share.share` says."""
    here, size = share()
    return here if rank is None else rank, size if world_size is None else world_size


class ResumableBatchSampler(Sampler[list]):
    """Batches whose order depends on (seed, epoch) alone, and which can begin in the middle of an epoch.

    The order knows neither the global random state, nor the number of workers, nor where an epoch was resumed. Lightning
    calls ``set_epoch``; a loop of your own should too. Several processes that train together each draw their own share of an
    epoch, of equal length; Lightning's Trainer must be told to leave that alone: ``use_distributed_sampler=False``.

    Args:
        seed: of the order.
        rank, world_size: which of how many processes this is; None: as torch.distributed says.
    """

    def __init__(self, seed: int = 0, rank: int | None = None, world_size: int | None = None) -> None:
        self.seed = seed
        self.rank, self.world_size = process_of(rank, world_size)
        self.epoch = 0
        self.start = 0

    @abstractmethod
    def batches(self, epoch: int, start: int) -> Iterator[list]:
        """This process's batches of an epoch, from number ``start`` on."""

    @property
    def sampler(self) -> "ResumableBatchSampler":
        """Itself: Lightning looks for ``set_epoch`` on a batch sampler's ``sampler``, not on the batch sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is of this epoch; from its first batch, unless it is the epoch to resume in."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def resume(self, epoch: int, start: int) -> None:
        """The next iteration of ``epoch`` begins at its batch number ``start``; later ones begin at 0."""
        self.epoch, self.start = epoch, start

    def __iter__(self) -> Iterator[list]:
        start, self.start = self.start, 0
        yield from self.batches(self.epoch, start)


class EpochBatchSampler(ResumableBatchSampler):
    """Batches of shuffled keys ``(epoch, index)``.

    Args:
        size: samples in the data set; what is left over when they are dealt out to the processes is left out.
        batch_size: keys a batch; the last batch is dropped where it would be smaller, unless there is no other.
        seed, rank, world_size: as of :class:`ResumableBatchSampler`.

    Raises:
        UserError: there are fewer samples than processes.
    """

    def __init__(
        self, size: int, batch_size: int, seed: int = 0, rank: int | None = None, world_size: int | None = None
    ) -> None:
        super().__init__(seed, rank, world_size)
        self.size = size
        if size < self.world_size:
            raise UserError(f"data: {size} samples cannot be dealt out to {self.world_size} processes")
        self.share = size // self.world_size
        self.batch_size = min(batch_size, self.share)

    def __len__(self) -> int:
        return self.share // self.batch_size

    def batches(self, epoch: int, start: int) -> Iterator[list[Key]]:
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, epoch))
        order = torch.randperm(self.size, generator=generator)[self.rank :: self.world_size].tolist()
        for batch in range(start, len(self)):
            first = batch * self.batch_size
            yield [(epoch, index) for index in order[first : first + self.batch_size]]
