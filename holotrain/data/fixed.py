"""The fixed order in which evaluation reads: every sample once, whichever process it falls to."""

from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import Sampler

from holotrain.data.sampler import process_of
from holotrain.errors import UserError


class FixedBatches(Sampler[list[int]]):
    """The same batches in the same order always; of several processes, each reads every so-manieth of them.

    All read equally many, for sharded layers want all processes at every batch: where the batches do not divide, some are cut
    in two, or put together, until they do.

    Args:
        batches: indices of each.
        rank, world_size: which of how many processes this is; None: as torch.distributed says.

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
    """The batches, as many as make a multiple of ``parts``: the largest are cut in two; those of one sample, where there are no
    others, are put together.

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
            raise UserError(f"data: {len(batches)} samples cannot be dealt out to {parts} processes")
    return batches


def in_batches(size: int, batch_size: int) -> list[np.ndarray]:
    """The indices of ``size`` samples in order, ``batch_size`` a batch."""
    return np.split(np.arange(size), range(batch_size, size, batch_size))
