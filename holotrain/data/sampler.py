"""The order of an epoch as a pure function of seed and epoch, and the share of it that a process reads."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from holotrain.errors import UserError
from holotrain.numeric import counted, mixed_seed

_shard: tuple[int, int] | None = None


def set_data_shard(rank: int | None = None, size: int | None = None) -> None:
    """Sets the data shard of this process to number ``rank`` of ``size``. Needed where several processes share a model
    and read the same shard. Without arguments: use the rank and size of torch.distributed again."""
    global _shard
    _shard = None if rank is None or size is None else (rank, size)


def data_shard() -> tuple[int, int]:
    """Index of this process's data shard and number of shards; (0, 1) for a single process."""
    if _shard is not None:
        return _shard
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


Key = tuple[int, ...]
"""(epoch, index), and of repeated samples (epoch, index, number of the copy): the key of a sample, so that the data set can
seed its augmentation with all of them."""


class ResumableBatchSampler(Sampler[list]):
    """Batches whose order depends on (seed, epoch) only, and which can start in the middle of an epoch.

    The order does not depend on the global random state, on the number of workers or on where an epoch was resumed. Lightning
    calls ``set_epoch``; your own loop should do so too. In distributed training, each process draws its own share of an epoch,
    all of equal length. Pass ``use_distributed_sampler=False`` to Lightning's Trainer.

    Args:
        seed: for the order.
        shard: of this process: its number and how many there are; None: :func:`data_shard`.

    Attributes:
        repeats: every epoch has the batches of the first one, with the same augmentation.
    """

    repeats = False

    def __init__(self, seed: int = 0, shard: tuple[int, int] | None = None) -> None:
        self.seed = seed
        self.rank, self.world_size = shard or data_shard()
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

    @abstractmethod
    def __len__(self) -> int:
        """This process's batches of an epoch."""

    def state_dict(self) -> dict[str, int]:
        """The epoch, and the number of its batches that were drawn, of how many."""
        return {"epoch": self.epoch, "batches": self.drawn, "of": len(self)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """The next iteration continues there; later ones start at the first batch.

        Raises:
            UserError: the state is of the middle of an epoch that had other batches.
        """
        of = state.get("of", len(self))  # checkpoints of before have none
        if 0 < state["batches"] < of != len(self):
            raise UserError(
                f"resume: the checkpoint is in the middle of an epoch of {of} batches, and this one has {len(self)}; continue "
                "with the same data, data.batch_size, data.max_tokens and processes, or from the end of an epoch"
            )
        self.epoch, self.drawn = state["epoch"], state["batches"]
        self._restored = True

    def __iter__(self) -> Iterator[list]:
        if not self._restored:
            self.drawn = 0
        self._restored = False
        for batch in self.batches(0 if self.repeats else self.epoch, self.drawn):
            self.drawn += 1
            yield batch


class EpochBatchSampler(ResumableBatchSampler):
    """Batches of shuffled keys ``(epoch, index)``.

    Args:
        size: samples in the data set; the remainder after an equal split among the processes is left out.
        batch_size: keys in a batch; a smaller last batch is dropped, unless it is the only one.
        seed, shard: see :class:`ResumableBatchSampler`.
        copies: of each sample, one after the other (Hoffer et al., "Augment your batch", 2020; DeiT). An epoch keeps its
            length, so it reads only one in ``copies`` of the samples.
    """

    def __init__(
        self, size: int, batch_size: int, seed: int = 0, shard: tuple[int, int] | None = None, copies: int = 1
    ) -> None:
        super().__init__(seed, shard)
        self.size, self.copies = size, copies
        if size < self.world_size:
            raise UserError(f"data: {counted(size, 'sample')} cannot be split among {self.world_size} processes")
        self.share = size // self.world_size
        self.batch_size = min(batch_size, self.share)
        self._moved: dict[int, int] = {}  # in an epoch that was begun with other batches: by how many samples they begin later

    def __len__(self) -> int:
        return self.share // self.batch_size

    @property
    def left_out(self) -> int:
        """Samples of this process's share that an epoch leaves out, others in each."""
        return self.share - len(self) * self.batch_size

    def state_dict(self) -> dict[str, int]:
        """Also the number of samples, of all processes, that were drawn."""
        drawn = self._begin(self.epoch, self.drawn) if self.drawn < len(self) else self.share
        return super().state_dict() | {"samples": drawn * self.world_size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """The next iteration continues after the same samples, also where batches or processes have changed."""
        self._moved = {}
        if 0 < state["batches"] < state.get("of", 0) and "samples" in state:
            drawn = min(state["samples"] // self.world_size, self.share - 1)
            left = max((self.share - drawn) // self.batch_size, 1)
            state = state | {"batches": len(self) - left, "of": len(self)}
            self._moved[state["epoch"]] = drawn - state["batches"] * self.batch_size
        super().load_state_dict(state)

    def _begin(self, epoch: int, batch: int) -> int:
        return batch * self.batch_size + self._moved.get(epoch, 0)

    def batches(self, epoch: int, start: int) -> Iterator[list[Key]]:
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, epoch))
        order = torch.randperm(self.size, generator=generator).tolist()
        places = range(self.rank, self.size, self.world_size)
        for batch in range(start, len(self)):
            first = self._begin(epoch, batch)
            drawn = [divmod(place, self.copies) for place in places[first : first + self.batch_size]]
            yield [(epoch, order[place], copy) if self.copies > 1 else (epoch, order[place]) for place, copy in drawn]


class FixedBatches(list[list[int]]):
    """Always the same batches in the same order. With several processes, each reads every so many of them.

    All processes read the same number of batches, because sharded layers need every process at every batch. Until the number is
    divisible, the largest batch is split in two; if all hold one sample, the last ones are joined.

    Args:
        batches: the indices of each batch.
        shard: see :class:`ResumableBatchSampler`.
    """

    def __init__(self, batches: Sequence[np.ndarray], shard: tuple[int, int] | None = None) -> None:
        rank, parts = shard or data_shard()
        sizes = halved([len(batch) for batch in batches], parts)
        if more := len(sizes) % parts:  # all hold one sample
            if len(sizes) < parts:
                raise UserError(f"data: {counted(len(sizes), 'sample')} cannot be split among {parts} processes")
            sizes[-1 - more :] = [1 + more]
        ends = np.cumsum(sizes)[:-1]
        super().__init__(batch.tolist() for batch in np.split(np.concatenate(batches), ends)[rank::parts])


def halved(sizes: Sequence[int], parts: int) -> list[int]:
    """The sizes of batches. The largest is halved until their number can be divided by ``parts``, or all hold one sample."""
    sizes = list(sizes)
    while len(sizes) % parts and max(sizes) > 1:
        largest = sizes.index(max(sizes))
        half = sizes[largest] // 2
        sizes[largest : largest + 1] = [half, sizes[largest] - half]
    return sizes


def in_batches(indices: np.ndarray, batch_size: int) -> list[np.ndarray]:
    """The indices in order, ``batch_size`` in each batch."""
    return np.split(indices, range(batch_size, len(indices), batch_size))
