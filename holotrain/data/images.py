"""What every image data set shares: loaders, augmentation, mixing."""

from abc import abstractmethod
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset
from torchvision.transforms import v2

from holotrain.data.augment import Statistics, batch_mixing, cropped_at_random, normalised, randaugment, resized
from holotrain.data.files import ImageFiles
from holotrain.data.loader import Loader, ResumableLoader
from holotrain.data.seeded import SeededDataset, TransformedDataset

SPLIT_SEED = 0
"""Parts of a data set that are cut by chance are the same whatever the run's seed."""


class ImageDataModule(pl.LightningDataModule):
    """Images and labels in three parts: train, val, test.

    Batches are images (B, C, H, W), float32, normalised, and labels (B,), int64; where MixUp or CutMix is on, training labels
    are (B, num_classes) probabilities.

    Args:
        batch_size: images a batch.
        num_workers: processes that load beside the training; 0 loads in it.
        pin_memory: page-locked batches; None: where there is a GPU.
        augment: random crops, flips or shifts, as suits the data.
        randaugment_ops, randaugment_magnitude: RandAugment on top; 0 operations for none.
        mixup_alpha, cutmix_alpha: Beta parameters of MixUp and CutMix; 0 for none.
        seed: of the order of batches and of augmentation.

    A subclass gives ``num_classes``, ``image_shape`` (C, H, W), ``class_names``, the ``statistics`` of its channels, and
    ``split`` once ``setup`` was called.
    """

    num_classes: int
    image_shape: tuple[int, int, int]
    class_names: list[str]
    statistics: Statistics

    def __init__(
        self,
        batch_size: int = 128,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        augment: bool = True,
        randaugment_ops: int = 0,
        randaugment_magnitude: int = 9,
        mixup_alpha: float = 0.0,
        cutmix_alpha: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.loading = {
            "num_workers": num_workers,
            "pin_memory": torch.cuda.is_available() if pin_memory is None else pin_memory,
        }
        self.augment = augment
        self.randaugment = randaugment(randaugment_ops, randaugment_magnitude)
        self.alphas = (mixup_alpha, cutmix_alpha)
        self.seed = seed

    @abstractmethod
    def split(self, name: str) -> Dataset:
        """The raw (image, label) pairs of ``train``, ``val`` or ``test``."""

    def geometry(self) -> list[v2.Transform]:
        """The random part of the augmentation: what moves pixels."""
        return cropped_at_random(self.image_shape[1])

    def framing(self) -> list[v2.Transform]:
        """What brings a raw image to ``image_shape`` without chance; nothing where it has that shape already."""
        return []

    def train_transform(self) -> v2.Compose:
        moved = self.geometry() if self.augment else self.framing()
        return v2.Compose([*moved, *self.randaugment, *normalised(self.statistics)])

    def eval_transform(self) -> v2.Compose:
        return v2.Compose([*self.framing(), *normalised(self.statistics)])

    def setup(self, stage: str | None = None) -> None:
        """Nothing to read, unless a data set says so."""

    def train_dataloader(self) -> ResumableLoader:
        seeded = SeededDataset(self.split("train"), self.train_transform(), self.seed)
        return ResumableLoader(seeded, self.batch_size, self.seed, **self.loading)

    def val_dataloader(self) -> Loader:
        return self._in_order(TransformedDataset(self.split("val"), self.eval_transform()))

    def test_dataloader(self) -> Loader:
        return self._in_order(TransformedDataset(self.split("test"), self.eval_transform()))

    def predict_dataloader(self) -> Loader:
        return self.test_dataloader()

    def on_after_batch_transfer(self, batch: tuple[Tensor, Tensor], dataloader_idx: int) -> tuple[Tensor, Tensor]:
        mixing = batch_mixing(self.num_classes, *self.alphas)
        if mixing is not None and self.trainer is not None and self.trainer.training:
            return mixing(*batch)
        return batch

    def _in_order(self, dataset: Dataset) -> Loader:
        return Loader(dataset, batch_size=self.batch_size, **self.loading)


def image_files(path: Path, channels: int, image_size: int, statistics: Statistics, batch_size: int, **loading: Any) -> Loader:
    """Image files of any size, brought to these channels, size and normalisation: batches (images, paths).

    Args:
        loading: DataLoader's own, such as ``num_workers``.

    Raises:
        UserError: there is no image at ``path``.
    """
    transform = v2.Compose([*resized(channels, image_size), *normalised(statistics)])
    return Loader(ImageFiles(path, transform), batch_size=batch_size, **loading)


def held_out(dataset: Dataset, labels: Tensor, fraction: float) -> tuple[Subset, Subset]:
    """Parts a data set in two, ``fraction`` of every class in the second; the same parts always.

    Args:
        labels: (N,) the class of each sample.
    """
    generator = torch.Generator().manual_seed(SPLIT_SEED)
    kept, out = [], []
    for label in labels.unique():
        members = (labels == label).nonzero().flatten()
        members = members[torch.randperm(len(members), generator=generator)]
        count = round(len(members) * fraction)
        out.append(members[:count])
        kept.append(members[count:])
    return tuple(Subset(dataset, torch.cat(part).sort().values.tolist()) for part in (kept, out))
