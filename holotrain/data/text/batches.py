"""Data sets that hand out whole batches, and the fixed order in which evaluation reads them."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from holotrain.data.sampler import process_of

Batch = dict[str, Any]
"""``tokens`` (B, T) int64, and what else the layout has."""


class Batched(Dataset):
    """A data set that gathers a batch in one step: what a loader passes on is ``__getitems__``'s result."""

    @abstractmethod
    def __getitems__(self, keys: Sequence[Any]) -> Batch:
        """The batch of these keys."""

    def __getitem__(self, key: Any) -> dict[str, Tensor]:
        """One sample, without a batch dimension."""
        return {name: value[0] for name, value in self.__getitems__([key]).items()}


def as_it_is(batch: Batch) -> Batch:
    """Collates what is a batch already."""
    return batch


class FixedBatches(Sampler[list[int]]):
    """The same batches in the same order always; of several processes, each reads every so-manieth of them.

    Args:
        batches: indices of each.
        rank, world_size: which of how many processes this is; None: as torch.distributed says.
    """

    def __init__(self, batches: Sequence[np.ndarray], rank: int | None = None, world_size: int | None = None) -> None:
        self.rank, self.world_size = process_of(rank, world_size)
        self.own = batches[self.rank :: self.world_size]

    def __len__(self) -> int:
        return len(self.own)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.own:
            yield batch.tolist()
