"""What all image data sets share: loaders, augmentation, mixing."""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, default_collate
from torchvision.transforms import v2

from holotrain.data.augment import (
    IMAGENET,
    SMALL,
    Statistics,
    batch_mixing,
    coloured,
    cropped_at_random,
    normalised,
    randaugment,
    resized,
)
from holotrain.data.files import ImageFiles
from holotrain.data.loader import Loader, LoadingModule, ResumableLoader
from holotrain.data.processor import statistics_of
from holotrain.data.seeded import SeededDataset, TransformedDataset
from holotrain.ranges import require_at_least, require_within

SPLIT_SEED = 0
"""Random splits of a data set are the same for every seed of a run."""


class ImageDataModule(LoadingModule):
    """Images and labels in three parts: train, val, test.

    Batches are images (B, C, H, W), float32, normalised, and labels (B,), int64. With MixUp or CutMix, training labels are
    (B, num_classes) probabilities.

    Args:
        batch_size: images per step and process; auto: the largest batch that fits into memory, by the plan
        channels_last: store the channels of a pixel side by side, which convolutions on GPUs prefer
        augment: random crops, flips or shifts, depending on the data set
        randaugment_ops: RandAugment operations per image; 0: none
        randaugment_magnitude: strength of the RandAugment operations, 0 to 30
        mixup_alpha: alpha of MixUp's Beta distribution; 0: no MixUp
        cutmix_alpha: alpha of CutMix's Beta distribution; 0: no CutMix; with MixUp too, each batch uses one of the two
        options: those of :class:`~holotrain.data.loader.LoadingModule`

    A subclass defines ``num_classes``, ``image_shape`` (C, H, W), ``class_names``, the ``statistics`` of its channels, and
    ``split``, which is called after ``setup``.

    Raises:
        ValueError: a value out of range.
    """

    num_classes: int
    image_shape: tuple[int, int, int]
    class_names: list[str]
    statistics: Statistics

    def __init__(
        self,
        batch_size: int = 128,
        channels_last: bool = False,
        augment: bool = True,
        randaugment_ops: int = 0,
        randaugment_magnitude: int = 9,
        mixup_alpha: float = 0.0,
        cutmix_alpha: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        require_at_least(1, batch_size=batch_size)
        require_at_least(0, randaugment_ops=randaugment_ops)
        require_at_least(0, mixup_alpha=mixup_alpha, cutmix_alpha=cutmix_alpha)
        require_within(0, 30, closed=True, randaugment_magnitude=randaugment_magnitude)
        self.batch_size = batch_size
        self.loading["collate_fn"] = collated_channels_last if channels_last else default_collate
        self.augment = augment
        self.randaugment = randaugment(randaugment_ops, randaugment_magnitude)
        self.alphas = (mixup_alpha, cutmix_alpha)

    @abstractmethod
    def split(self, name: str) -> Dataset:
        """The raw (image, label) pairs of ``train``, ``val`` or ``test``."""

    def geometry(self) -> list[v2.Transform]:
        """The random geometric transforms."""
        return cropped_at_random(self.image_shape[1])

    def framing(self) -> list[v2.Transform]:
        """The deterministic transforms from a raw image to ``image_shape``; empty if it already has that shape."""
        return []

    def train_transform(self) -> v2.Compose:
        moved = self.geometry() if self.augment else self.framing()
        return v2.Compose([*moved, *self.randaugment, *normalised(self.statistics)])

    def eval_transform(self) -> v2.Compose:
        return v2.Compose([*self.framing(), *normalised(self.statistics)])

    def setup(self, stage: str | None = None) -> None:
        """Reads nothing by default."""

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


class SizedImages(ImageDataModule):
    """Images of any size, cropped and resized to one.

    Args:
        image_size: height and width of an image after augmentation, in pixels
        processor: normalise as a published model does: its folder, with preprocessor_config.json or timm's config.json, or its
            name in timm; null: as for ImageNet
        options: those of :class:`ImageDataModule`

    Raises:
        ValueError: a value out of range.
        UserError: the processor says no mean and deviation.
    """

    statistics = IMAGENET

    def __init__(self, image_size: int = 224, processor: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        require_at_least(1, image_size=image_size)
        self.image_shape = (3, image_size, image_size)
        if processor is not None:
            self.statistics = statistics_of(processor)

    def geometry(self) -> list[v2.Transform]:
        size = self.image_shape[1]
        framed = self.framing() if size <= SMALL else coloured(3)
        return [*framed, *cropped_at_random(size)]

    def framing(self) -> list[v2.Transform]:
        return resized(*self.image_shape[:2])


def collated_channels_last(samples: Sequence[tuple[Tensor, int]]) -> list[Tensor]:
    """A batch of images (B, C, H, W), strided as (B, H, W, C), and labels."""
    images, labels = default_collate(samples)
    return [images.contiguous(memory_format=torch.channels_last), labels]


def image_files(path: Path, channels: int, image_size: int, statistics: Statistics, batch_size: int, **loading: Any) -> Loader:
    """Image files of any size, converted to these channels, this size and normalisation, in batches (images, paths).

    Args:
        loading: options of DataLoader, such as ``num_workers``.

    Raises:
        UserError: there is no image at ``path``.
    """
    transform = v2.Compose([*resized(channels, image_size), *normalised(statistics)])
    return Loader(ImageFiles(path, transform), batch_size=batch_size, **loading)


def held_out(dataset: Dataset, labels: Tensor, fraction: float) -> tuple[Subset, Subset]:
    """Splits a data set in two, with ``fraction`` of every class in the second part. The split is always the same.

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
