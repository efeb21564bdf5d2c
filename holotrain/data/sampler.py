"""The order of an epoch as a pure function of seed and epoch."""

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from holotrain.data.shard import data_shard
from holotrain.errors import UserError
from holotrain.seeds import mixed_seed

Key = tuple[int, int]
"""(epoch, index): the key of a sample, so that the data set can seed its augmentation with both."""


def process_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Number of this process's shard, and of shards; where None, those of :func:`holotrain.data.shard.data_shard`."""
    here, size = data_shard()
    return here if rank is None else rank, size if world_size is None else world_size


class ResumableBatchSampler(Sampler[list]):
    """Batches whose order depends on (seed, epoch) only, and which can start in the middle of an epoch.

    The order does not depend on the global random state, on the number of workers or on where an epoch was resumed. Lightning
    calls ``set_epoch``; your own loop should do so too. In distributed training, each process draws its own share of an epoch,
    all of equal length. Pass ``use_distributed_sampler=False`` to Lightning's Trainer.

    Args:
        seed: for the order.
        rank, world_size: of this process; None: as torch.distributed says.
    """

    def __init__(self, seed: int = 0, rank: int | None = None, world_size: int | None = None) -> None:
        self.seed = seed
        self.rank, self.world_size = process_of(rank, world_size)
        self.epoch, self.drawn, self._restored = 0, 0, False

    @abstractmethod
    def batches(self, epoch: int, start: int) -> Iterator[list]:
        """This process's batches of an epoch, starting at batch number ``start``."""

    @property
    def sampler(self) -> "ResumableBatchSampler":
        """Itself: Lightning looks for ``set_epoch`` on a batch sampler's ``sampler``, not on the batch sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch. It starts at the first batch, unless another one was restored for this epoch."""
        if epoch != self.epoch:
            self.epoch, self.drawn = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """The epoch, and the number of its batches that were drawn."""
        return {"epoch": self.epoch, "batches": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """The next iteration continues there; later ones start at the first batch."""
        self.epoch, self.drawn = state["epoch"], state["batches"]
        self._restored = True

    def __iter__(self) -> Iterator[list]:
        if not self._restored:
            self.drawn = 0
        self._restored = False
        for batch in self.batches(self.epoch, self.drawn):
            self.drawn += 1
            yield batch


class EpochBatchSampler(ResumableBatchSampler):
    """Batches of shuffled keys ``(epoch, index)``.

    Args:
        size: samples in the data set; the remainder after an equal split among the processes is left out.
        batch_size: keys in a batch; a smaller last batch is dropped, unless it is the only one.
        seed, rank, world_size: see :class:`ResumableBatchSampler`.

    Raises:
        UserError: there are fewer samples than processes.
    """

    def __init__(
        self, size: int, batch_size: int, seed: int = 0, rank: int | None = None, world_size: int | None = None
    ) -> None:
        super().__init__(seed, rank, world_size)
        self.size = size
        if size < self.world_size:
            raise UserError(f"data: {size} samples cannot be split among {self.world_size} processes")
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
