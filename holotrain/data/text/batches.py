"""Data sets that return whole batches."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

Batch = dict[str, Any]
"""``tokens`` (B, T) int64, and the other entries of the layout."""


class Batched(Dataset):
    """A data set that gathers a batch in one step: the loader returns the result of ``__getitems__``."""

    @abstractmethod
    def __getitems__(self, keys: Sequence[Any]) -> Batch:
        """The batch of these keys."""

    def __getitem__(self, key: Any) -> dict[str, Tensor]:
        """One sample, without a batch dimension."""
        return {name: value[0] for name, value in self.__getitems__([key]).items()}


def as_it_is(batch: Batch) -> Batch:
    """A collate function for batches that are complete already."""
    return batch
