"""The fixed order in which evaluation reads: every sample exactly once, in one of the processes."""

from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import Sampler

from holotrain.data.sampler import process_of
from holotrain.errors import UserError


class FixedBatches(Sampler[list[int]]):
    """Always the same batches in the same order. With ``world_size`` processes, each reads every ``world_size``-th of them.

    All processes read the same number of batches, because sharded layers need every process at every batch. If the number of
    batches is not divisible, some are split in two, or joined, until it is.

    Args:
        batches: the indices of each batch.
        rank, world_size: of this process; None: as torch.distributed says.

    Raises:
        UserError: there are fewer samples than processes.
    """

    def __init__(self, batches: Sequence[np.ndarray], rank: int | None = None, world_size: int | None = None) -> None:
        self.rank, self.world_size = process_of(rank, world_size)
        self.own = divided(batches, self.world_size)[self.rank :: self.world_size]

    def __len__(self) -> int:
        return len(self.own)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.own:
            yield batch.tolist()


def divided(batches: Sequence[np.ndarray], parts: int) -> list[np.ndarray]:
    """The batches, split or joined so that their number is a multiple of ``parts``: the largest are split in two; if all hold
    one sample, the last ones are joined.

    Raises:
        UserError: there are fewer samples than parts.
    """
    batches = list(batches)
    while len(batches) % parts:
        largest = max(range(len(batches)), key=lambda number: len(batches[number]))
        if len(batches[largest]) > 1:
            batches[largest : largest + 1] = np.array_split(batches[largest], 2)
        elif len(batches) > parts:
            keep = len(batches) // parts * parts
            batches[keep - 1 :] = [np.concatenate(batches[keep - 1 :])]
        else:
            raise UserError(f"data: {len(batches)} samples cannot be split among {parts} processes")
    return batches


def in_batches(size: int, batch_size: int) -> list[np.ndarray]:
    """The indices of ``size`` samples in order, ``batch_size`` in each batch."""
    return np.split(np.arange(size), range(batch_size, size, batch_size))
