"""Data sets that hand out whole batches."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

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
