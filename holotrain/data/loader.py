"""Data loaders that do not use the global random state, and one that can save and restore its position."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from holotrain.data.fixed import FixedBatches, in_batches
from holotrain.data.sampler import EpochBatchSampler, ResumableBatchSampler
from holotrain.data.share import share
from holotrain.errors import UserError


class Loader(DataLoader):
    """A DataLoader with its own generator and persistent workers, which re-raises a worker's UserError as one line.

    Without a batch sampler it reads in order, and with several processes each reads its share.
    """

    def __init__(self, dataset: Dataset, batch_size: int = 1, **options: Any) -> None:
        if "batch_sampler" not in options:
            alone = share() == (0, 1)
            options |= (
                {"batch_size": batch_size} if alone else {"batch_sampler": FixedBatches(in_batches(len(dataset), batch_size))}
            )
        defaults = {"generator": torch.Generator(), "persistent_workers": options.get("num_workers", 0) > 0}
        super().__init__(dataset, **defaults | options)

    def __iter__(self) -> Iterator[Any]:
        # A generator, so that workers start and the sampler is read at the first batch: Lightning creates the iterator before
        # it tells the sampler the epoch.
        try:
            yield from super().__iter__()
        except UserError as error:
            # The text of a worker's exception is the worker's whole traceback.
            raise UserError(str(error).strip().splitlines()[-1].partition("UserError: ")[2] or str(error)) from None


class ResumableLoader(Loader):
    """A training loader whose position in the epoch can be saved and restored.

    Lightning stores ``state_dict`` in its checkpoints. It counts the batches that were handed out, not those that workers
    have prefetched, so a resumed epoch continues with the next batch for any number of workers.

    Args:
        dataset: takes keys ``(epoch, index)``, or the keys that the batch sampler gives.
        batch_size: samples in a batch.
        seed: for the order of each epoch.
        batch_sampler: draws the batches; None: samples are shuffled into batches of ``batch_size``.
        options: other options of DataLoader, such as ``num_workers`` and ``pin_memory``.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int = 1,
        seed: int = 0,
        batch_sampler: ResumableBatchSampler | None = None,
        **options: Any,
    ) -> None:
        if batch_sampler is None:
            batch_sampler = EpochBatchSampler(len(dataset), batch_size, seed)
        super().__init__(dataset, batch_sampler=batch_sampler, **options)
        self._epoch, self._consumed = 0, 0

    def __iter__(self) -> Iterator[Any]:
        sampler: ResumableBatchSampler = self.batch_sampler
        self._epoch, self._consumed = sampler.epoch, sampler.start
        for batch in super().__iter__():
            self._consumed += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """The epoch, and the number of its batches that were handed out."""
        return {"epoch": self._epoch, "batches": self._consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """The next iteration continues from there."""
        self._epoch, self._consumed = state["epoch"], state["batches"]
        self.batch_sampler.resume(state["epoch"], state["batches"])
