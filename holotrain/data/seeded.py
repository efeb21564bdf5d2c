"""Random augmentation that depends on the seed, the epoch and the sample only."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset

from holotrain.data.sampler import Key, mixed_seed


class SeededDataset(Dataset):
    """Applies a random transform under a random state seeded by (seed, epoch, index).

    A sample's augmentation therefore does not depend on the number of workers, on the order of computation or on where a run
    was resumed, and the global random state does not change.

    Args:
        dataset: gives (image, label) by index.
        transform: for the image; draws from torch's global generator.
        seed: the run's.
    """

    def __init__(self, dataset: Dataset, transform: Callable[[Any], Any], seed: int) -> None:
        self.dataset = dataset
        self.transform = transform
        self.seed = seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Key) -> tuple[Any, Any]:
        epoch, index = key
        image, label = self.dataset[index]
        ambient = torch.get_rng_state()
        torch.random.default_generator.manual_seed(mixed_seed(self.seed, epoch, index))
        try:
            return self.transform(image), label
        finally:
            torch.set_rng_state(ambient)


class TransformedDataset(Dataset):
    """Applies a deterministic transform; indexed by plain integers."""

    def __init__(self, dataset: Dataset, transform: Callable[[Any], Any]) -> None:
        self.dataset = dataset
        self.transform = transform

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image, label = self.dataset[index]
        return self.transform(image), label
