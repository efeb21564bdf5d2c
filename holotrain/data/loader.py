"""Loaders that leave the global random state alone and can be resumed in mid-epoch, and augmentation that is seeded."""

import hashlib
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, cast

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from holotrain.data.sampler import EpochBatchSampler, FixedBatches, Key, ResumableBatchSampler, data_shard, in_batches
from holotrain.errors import UserError
from holotrain.numeric import mixed_seed, require_at_least
from holotrain.targets import ShowsInherited


class OwnGenerator(DataLoader):
    """A DataLoader with its own generator and persistent workers, which re-raises a worker's UserError as one line."""

    def __init__(self, dataset: Dataset, **options: Any) -> None:
        defaults: dict[str, Any] = {"generator": torch.Generator(), "persistent_workers": options.get("num_workers", 0) > 0}
        defaults["worker_init_fn"] = _end_quietly
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # which torchdata 0.11 calls
            super().__init__(dataset, **defaults | options)

    def __iter__(self) -> Any:
        # A generator, so that workers start and the sampler is read at the first batch: Lightning creates the iterator before
        # it tells the sampler the epoch.
        try:
            yield from super().__iter__()
            return
        except UserError as error:
            # The argument of a worker's exception is the worker's whole traceback; str() would make it one line.
            message = str(*error.args)
            line = message.strip().splitlines()[-1].partition("UserError: ")[2] or message
            traceback.clear_frames(error.__traceback__)  # they hold the iterator, and each other
        # Its workers end now. If the garbage collector finds them, it closes their queues first and waits 5 seconds for each.
        self._iterator = None
        raise UserError(line)


def _end_quietly(worker: int) -> None:
    """No traceback if the training ends while this worker hands a batch over. Errors in data go through a queue."""
    shown = sys.excepthook
    sys.excepthook = lambda kind, *rest: None if issubclass(kind, ConnectionError | EOFError) else shown(kind, *rest)


class Loader(OwnGenerator):
    """For evaluation. Without a batch sampler it reads in order, and with several processes each reads its share.

    Args:
        dataset: indexed by number, or by what a batch sampler gives.
        batch_size: samples in a batch; the last may have fewer.
        options: those of DataLoader, such as ``num_workers``.
    """

    def __init__(self, dataset: Dataset, batch_size: int = 1, **options: Any) -> None:
        if "batch_sampler" not in options:
            if data_shard() == (0, 1):
                options["batch_size"] = batch_size
            else:
                indices = np.arange(len(dataset))  # ty: ignore[invalid-argument-type]: torch declares no length
                options["batch_sampler"] = FixedBatches(in_batches(indices, batch_size))
        super().__init__(dataset, **options)


class ResumableLoader(OwnGenerator, StatefulDataLoader):
    """A training loader whose position in the epoch can be saved and restored.

    torchdata's StatefulDataLoader keeps the state that the batch sampler had when it drew the batch that was handed out last,
    whatever the workers have prefetched since. That state is all that is saved, so training can continue with any number of
    workers and processes.

    Args:
        dataset: takes keys ``(epoch, index)``, or the keys that the batch sampler gives.
        batch_sampler: draws the batches; None: samples are shuffled into batches of ``batch_size``.
        seed: for the order of each epoch.
        copies: of each sample, see :class:`~holotrain.data.sampler.EpochBatchSampler`.
        options: other options of DataLoader, such as ``num_workers`` and ``pin_memory``.
    """

    batch_sampler: ResumableBatchSampler

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int = 1,
        seed: int = 0,
        batch_sampler: ResumableBatchSampler | None = None,
        copies: int = 1,
        **options: Any,
    ) -> None:
        if batch_sampler is None:
            size = len(dataset)  # ty: ignore[invalid-argument-type]: torch declares no length
            batch_sampler = EpochBatchSampler(size, batch_size, seed, copies=copies)
        super().__init__(dataset, batch_sampler=batch_sampler, **options)

    def state_dict(self) -> dict[str, int]:
        """That of the batch sampler, after the batches that were handed out."""
        if self._iterator is None:  # StatefulDataLoader would start the workers
            return self.batch_sampler.state_dict()
        state = super().state_dict()
        if self.num_workers:
            state = state["_snapshot"]["_main_snapshot"]
        return state["_index_sampler_state"]

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """The next iteration continues from there.

        Raises:
            UserError: the state is not that of such a loader.
        """
        if "stream" in state_dict:
            raise UserError("resume: the checkpoint's position is that of a stream; continue with data.streaming=true")
        super().load_state_dict({})  # the iterator of an earlier epoch is dropped
        self.batch_sampler.load_state_dict(state_dict)


def left_out(data: pl.LightningDataModule) -> tuple[int, int]:
    """Training samples that an epoch leaves out in each process, since they fill no batch, of how many; 0 of data of others."""
    sampler = getattr(data.train_dataloader(), "batch_sampler", None) if isinstance(data, LoadingModule) else None
    return (sampler.left_out, sampler.share) if isinstance(sampler, EpochBatchSampler) else (0, 0)


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_count(wanted: int | None) -> int:
    """Worker processes of a loader; None: one a core, at most 8."""
    return min(usable_cores(), 8) if wanted is None else wanted


class LoadingModule(ShowsInherited, pl.LightningDataModule):
    """What the loaders of a data module take.

    Args:
        num_workers: worker processes that load data; 0: load in the training process; null: one a core, at most 8
        pin_memory: pin batches in host memory for faster copies to a GPU; null: if a GPU is used
        seed: seed of the order of batches and of augmentation
    """

    def __init__(self, num_workers: int | None = 0, pin_memory: bool | None = None, seed: int = 0) -> None:
        super().__init__()
        require_at_least(0, num_workers=num_workers)
        pinned = torch.cuda.is_available() if pin_memory is None else pin_memory
        self.loading: dict[str, Any] = {"num_workers": worker_count(num_workers), "pin_memory": pinned}
        self.seed = seed

    @property
    def overfits(self) -> bool:
        """Whether the trainer is to train on the same few batches in every epoch."""
        return bool(getattr(self.trainer, "overfit_batches", 0))

    def training_loader(self, dataset: Dataset, batch_size: int = 1, **options: Any) -> ResumableLoader:
        """The loader of the training part; ``options``: of :class:`ResumableLoader`."""
        loader = ResumableLoader(dataset, batch_size, self.seed, **options, **self.loading)
        loader.batch_sampler.repeats = self.overfits
        return loader

    batch_unit = 1
    """The smallest sensible increment of the size of a batch."""

    def zeros(self, size: int) -> Any | None:
        """See :func:`example_batch`; None: the shapes are known of a real batch only."""
        return None

    def fingerprint(self) -> dict[str, Any]:
        """What must be equal in all processes after ``setup``, by names for messages, in plain values."""
        return {}


def first_batch(data: pl.LightningDataModule) -> Any:
    """The first training batch of data of others; None for holotrain's, whose shapes are known without it."""
    if isinstance(data, LoadingModule) and type(data).zeros is not LoadingModule.zeros:
        return None
    with torch.random.fork_rng(devices=[]):  # an epoch is shuffled as if nobody had looked at its first batch
        first = next(iter(data.train_dataloader()), None)
    if first is None:
        raise UserError("data: the training loader gives no batch")
    return first


def example_batch(data: pl.LightningDataModule, size: int, first: Any = None) -> Any:
    """A training batch of zeros, at least as large as the largest that ``data`` can give. ``data`` must be set up.

    Args:
        size: number of images, packed blocks or documents; of tokens, if documents are batched by ``max_tokens``.
        first: from :func:`first_batch`; other batches differ from it in their first dimension only.
    """
    if first is None:
        return cast(LoadingModule, data).zeros(size)
    length = samples_in(first)

    def zeros(tensor: Tensor) -> Tensor:
        shape = (size, *tensor.shape[1:]) if tensor.ndim and len(tensor) == length else tensor.shape
        return torch.zeros(shape, dtype=tensor.dtype)

    return tree_map_only(Tensor, zeros, first)


def samples_in(batch: Any) -> int:
    """The first dimension of the first tensor in a batch."""
    return next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), 1)


def batch_unit(data: pl.LightningDataModule) -> int:
    """The smallest sensible increment of the size of a batch: see :func:`example_batch`."""
    return data.batch_unit if isinstance(data, LoadingModule) else 1


def in_places(size: int) -> list[int]:
    """A few indices of so many samples, from the first to the last."""
    return sorted({place * (size - 1) // 4 for place in range(5)}) if size else []


def digest(*parts: str | bytes) -> str:
    """A short hash: equal in all processes."""
    found = hashlib.blake2b(digest_size=6)
    for part in parts:
        found.update(part if isinstance(part, bytes) else part.encode(errors="surrogatepass") + b"\0")
    return found.hexdigest()


class StreamLoader:
    """An endless stream, in epochs of ``length`` batches. Each epoch continues where the one before it ended.

    The position of the stream in its files belongs to each worker and process: training continues with as many of both.
    """

    def __init__(self, dataset: IterableDataset, length: int, **options: Any) -> None:
        self.batches = Batches(dataset, **options)
        self._place = {"processes": [*data_shard()], "workers": [self.batches.num_workers]}
        self.length, self.epoch, self.done = length, 0, 0
        self._stream: Iterator[Any] | None = None
        self._restored: dict[str, Any] = {}

    @property
    def sampler(self) -> "StreamLoader":
        """Where Lightning looks for ``set_epoch``."""
        return self

    @property
    def _iterator(self) -> Iterator[Any] | None:
        """What Lightning sets to None after training: the workers end then, and need not wait for the garbage collector."""
        return self._stream

    @_iterator.setter
    def _iterator(self, none: None) -> None:
        self._stream = self.batches._iterator = none

    def __len__(self) -> int:
        return self.length

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch; another epoch than before starts at its first batch."""
        if epoch != self.epoch:
            self.epoch, self.done = epoch, 0

    def __iter__(self) -> Iterator[Any]:
        if self.done == self.length:
            self.done = 0
        if self._stream is None:
            self._stream = iter(self.batches)
        for batch in islice(self._stream, self.length - self.done):
            self.done += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the number of its batches that were handed out, and the state of the stream."""
        stream = self._restored if self._stream is None else self.batches.state_dict()
        return {"epoch": self.epoch, "batches": self.done, "stream": stream, "place": self._place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration continues from there.

        Raises:
            UserError: it is the state of another loader or shard, or of another number of workers or shards.
        """
        if "stream" not in state:
            raise UserError("resume: the checkpoint's position is not that of a stream; continue with data.streaming=false")
        before, here = state["place"], self._place
        for key, what in {"processes": "data parallel processes", "workers": "workers"}.items():
            if (count := before[key][-1]) != here[key][-1]:
                raise UserError(f"resume: a stream continues with as many {what} as before, {count}, not {here[key][-1]}")
        if before != here:
            raise UserError(f"resume: the position is that of shard {before['processes'][0]}, not {here['processes'][0]}")
        self._stream, self._restored = None, state["stream"]
        self.epoch, self.done = state["epoch"], state["batches"]
        self.batches.load_state_dict(state["stream"])


class Batches(OwnGenerator, StatefulDataLoader):
    """StatefulDataLoader itself: the state holds that of the data set in every worker."""


class TransformedDataset(Dataset):
    """Images and labels (image, label), with a deterministic transform of the image."""

    def __init__(self, dataset: Dataset, transform: Callable[[Any], Any]) -> None:
        self.dataset, self.transform = dataset, transform

    def __len__(self) -> int:
        return len(self.dataset)  # ty: ignore[invalid-argument-type]: torch declares no length

    def __getitem__(self, index: Any) -> tuple[Any, Any]:
        image, label = self.dataset[index]
        return self.transform(image), label


class SeededDataset(TransformedDataset):
    """Applies a random transform to the image of (image, label); indexed by a :data:`~holotrain.data.sampler.Key`.

    The transform draws from torch's global generator, which is seeded by (seed, *key) and then put back. So a sample's
    augmentation does not depend on the number of workers, on the order of computation or on where a run was resumed.
    """

    def __init__(self, dataset: Dataset, transform: Callable[[Any], Any], seed: int) -> None:
        super().__init__(dataset, transform)
        self.seed = seed

    def __getitem__(self, index: Key) -> tuple[Any, Any]:
        image, label = self.dataset[index[1]]
        with torch.random.fork_rng(devices=[]):
            torch.random.default_generator.manual_seed(mixed_seed(self.seed, *index))
            return self.transform(image), label
