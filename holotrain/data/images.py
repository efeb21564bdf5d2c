"""What all image data sets share: transforms, loaders, augmentation, mixing, some of the classes."""

import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset, Subset
from torchvision.transforms import v2

from holotrain.data.loader import (
    Loader,
    LoadingModule,
    ResumableLoader,
    SeededDataset,
    TransformedDataset,
    digest,
)
from holotrain.errors import UserError, as_user_error, check_choice
from holotrain.files import read_json
from holotrain.models.external import not_of_timm
from holotrain.numeric import require_at_least, require_one_of, require_within
from holotrain.targets import blaming, needed

Statistics = tuple[Sequence[float], Sequence[float]]
"""Mean and standard deviation of each channel, for values in [0, 1]."""

IMAGENET: Statistics = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

INTERPOLATIONS = {"bilinear": v2.InterpolationMode.BILINEAR, "bicubic": v2.InterpolationMode.BICUBIC}

PIL_INTERPOLATIONS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}

SMALL = 64
"""Images of up to this many pixels are padded and cropped; larger ones are cropped at random and resized."""


def normalised(statistics: Statistics) -> list[v2.Transform]:
    """Converts to float32 in [0, 1], then to zero mean and unit variance, in the same memory."""
    return [v2.ToImage(), v2.Lambda(scaled), v2.Normalize(*statistics, inplace=True)]


def scaled(image: torch.Tensor) -> torch.Tensor:
    """A new float32 image in [0, 1]."""
    return image.clone() if image.dtype == torch.float32 else v2.functional.to_dtype(image, torch.float32, scale=True)


def cropped_at_random(
    image_size: int, *, flip: bool = True, interpolation: str = "bilinear", crop_scale: float = 0.08
) -> list[v2.Transform]:
    """The usual crops and flips for training."""
    crop: v2.Transform = v2.RandomCrop(image_size, padding=image_size // 8)
    if image_size > SMALL:
        crop = v2.RandomResizedCrop(image_size, (crop_scale, 1), interpolation=INTERPOLATIONS[interpolation], antialias=True)
    return [crop, v2.RandomHorizontalFlip()] if flip else [crop]


def crop_pct(image_size: int) -> float:
    """``image_size`` over the shorter side of which evaluation cuts the centre, as timm calls it."""
    return 1.0 if image_size <= SMALL else 0.875


def resized(channels: int, image_size: int, interpolation: str = "bilinear") -> list[v2.Transform]:
    """Any image to ``channels`` and ``image_size``: resizes the shorter side and crops."""
    resize = v2.Resize(int(image_size / crop_pct(image_size)), INTERPOLATIONS[interpolation], antialias=True)
    return [*coloured(channels), resize, v2.CenterCrop(image_size)]


def posterized(image: Image.Image, bits: int, **options: Any) -> Image.Image:
    """An image in fewer bits a channel. timm asks for 0 at the largest magnitude: black, which newer Pillows refuse to make."""
    return ImageOps.posterize(image, min(bits, 8)) if bits else Image.new(image.mode, image.size)


class TimmRandAugment:
    """RandAugment of timm, whose random numbers follow torch's seed. An image (3, H, W) to uint8 (3, H, W).

    Args:
        described: as timm writes it: rand-m9-mstd0.5-inc1.
        mean: of the channels, which fills what an operation leaves empty.
        interpolation: of what is turned and sheared.

    Raises:
        ValueError: timm is not installed, or does not understand ``described``.
    """

    def __init__(self, described: str, mean: Sequence[float], interpolation: str) -> None:
        timm = needed("timm.data.auto_augment", "randaugment needs timm", "timm")
        options = {"img_mean": tuple(round(255 * each) for each in mean), "interpolation": PIL_INTERPOLATIONS[interpolation]}
        try:
            self.augment = timm.rand_augment_transform(described, options)
        except (AssertionError, ValueError, KeyError) as error:
            said = f"randaugment must be as timm writes it, such as rand-m9-mstd0.5-inc1, not {described!r}"
            raise ValueError(said) from error
        for operation in self.augment.ops:
            if operation.aug_fn is timm.posterize:
                operation.aug_fn = posterized

    def __call__(self, image: Tensor) -> Tensor:
        states = random.getstate(), np.random.get_state()
        seed = int(torch.randint(2**31, ()))
        random.seed(seed)
        np.random.seed(seed)
        try:
            eight_bits = v2.functional.to_dtype(image, torch.uint8, scale=True)
            return v2.functional.pil_to_tensor(self.augment(v2.functional.to_pil_image(eight_bits)))
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def coloured(channels: int) -> list[v2.Transform]:
    """Any image to a tensor of one (grey) or three channels."""
    return [v2.ToImage(), v2.Grayscale(1) if channels == 1 else v2.RGB()]


SETTINGS = ("preprocessor_config.json", "config.json")
"""Files that say how a model's images are normalised: of Hugging Face, and of timm."""


def statistics_of(processor: str) -> Statistics:
    """Mean and standard deviation of the channels.

    Args:
        processor: a folder with preprocessor_config.json (Hugging Face) or config.json (timm), or a name of timm's.

    Raises:
        UserError: there is no such folder or name, or its file does not say it.
    """
    files = [path for name in SETTINGS if (path := Path(processor).expanduser() / name).is_file()]
    with as_user_error("data.processor"):
        settings = _settings_in(files[0]) if files else _settings_of_timm(processor)
        mean: Any = settings.get("mean") or settings.get("image_mean")
        std: Any = settings.get("std") or settings.get("image_std")
        with suppress(TypeError, ValueError, OverflowError, RuntimeError):
            both = torch.tensor([mean, std], dtype=torch.float32)
            if both.shape == (2, 3) and both.isfinite().all() and (both[1] > 0).all():
                return [float(value) for value in mean], [float(value) for value in std]
        raise ValueError(f"{processor} does not say a mean and a deviation above 0 for three channels")


def _settings_in(path: Path) -> dict[str, Any]:
    try:
        settings = read_json(path)
        return dict(settings.get("pretrained_cfg", settings))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read: it is damaged") from error


def _settings_of_timm(name: str) -> dict[str, Any]:
    nowhere = f"there is no folder {name} with {' or '.join(SETTINGS)}"
    timm = needed("timm", f"{nowhere}; for a name of timm's", "timm")
    with blaming("timm"):  # an unknown tag
        published = timm.get_pretrained_cfg(name)
    if published:
        return published.to_dict()
    raise ValueError(f"{nowhere}, and {not_of_timm(name)}")


def chosen_classes(classes: Sequence[str | int], names: Sequence[str]) -> list[int]:
    """The indices of the requested classes, given by name, or by number if no class has that name. An empty list means all."""
    if not classes:
        return list(range(len(names)))
    indices: list[int] = []
    for one in classes:
        if type(one) is int and str(one) not in names and 0 <= one < len(names):
            index = one
        else:
            check_choice("data.classes", str(one), names)
            index = names.index(str(one))
        if index in indices:
            raise UserError(f"data.classes: {names[index]} is given twice")
        indices.append(index)
    if len(indices) < 2:
        raise UserError(f"data.classes: {names[indices[0]]} is the only class; give at least two")
    return indices


Labelled = tuple[Dataset, Tensor]
"""Samples (image, label), and the class of each (N,)."""


class OfClasses(Dataset):
    """The samples of some classes, labelled 0, 1, ... in the order of ``classes``; ``labels`` (N,) are those of all samples."""

    def __init__(self, dataset: Dataset, labels: Tensor, classes: Sequence[int]) -> None:
        number = {label: place for place, label in enumerate(classes)}
        self.dataset = dataset
        self.samples = [(index, number[label]) for index, label in enumerate(labels.tolist()) if label in number]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        place, label = self.samples[index]
        return self.dataset[place][0], label


class ImageDataModule(LoadingModule):
    """Images and labels in three parts: train, val, test.

    Batches are images (B, C, H, W), float32, normalised, and labels (B,), int64. With MixUp or CutMix, training labels are
    (B, num_classes) probabilities.

    Args:
        batch_size: images per step and process; auto: the largest batch that fits into memory, by the plan
        augment: random crops, flips or shifts, depending on the data set
        randaugment_ops: RandAugment operations per image; 0: none
        randaugment_magnitude: strength of the RandAugment operations, 0 to 30
        mixup_alpha: alpha of MixUp's Beta distribution; 0: no MixUp
        cutmix_alpha: alpha of CutMix's Beta distribution; 0: no CutMix; with MixUp too, each batch uses one of the two
        color_jitter: by how much brightness, contrast and saturation vary, such as 0.4; 0: not at all
        random_erasing: probability that a random rectangle of an image becomes noise (Zhong et al., 2020)
        repeated_augmentation: copies of each image in an epoch, augmented each in its own way; an epoch keeps its length

    A subclass defines ``num_classes``, ``image_shape`` (C, H, W), the ``statistics`` of its channels, ``class_names`` (maybe
    after ``setup`` only), and ``split``, which is called after ``setup``, or sets ``_splits`` there.
    """

    num_classes: int
    image_shape: tuple[int, int, int]
    class_names: list[str]
    statistics: Statistics
    _splits: Mapping[str, Dataset]

    def __init__(
        self,
        batch_size: int = 128,
        augment: bool = True,
        randaugment_ops: int = 0,
        randaugment_magnitude: int = 9,
        mixup_alpha: float = 0.0,
        cutmix_alpha: float = 0.0,
        color_jitter: float = 0.0,
        random_erasing: float = 0.0,
        repeated_augmentation: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        require_at_least(1, batch_size=batch_size, repeated_augmentation=repeated_augmentation)
        require_at_least(0, randaugment_ops=randaugment_ops)
        require_at_least(0, mixup_alpha=mixup_alpha, cutmix_alpha=cutmix_alpha)
        require_within(0, 30, closed=True, randaugment_magnitude=randaugment_magnitude)
        require_within(0, 1, closed=True, color_jitter=color_jitter, random_erasing=random_erasing)
        self.batch_size = batch_size
        self.augment = augment
        self.varied: list[Any] = [v2.RandAugment(randaugment_ops, randaugment_magnitude)] if randaugment_ops else []
        self.varied += [v2.ColorJitter(*[color_jitter] * 3)] if color_jitter else []
        noise: Any = "random"  # of each pixel, which torchvision declares a number
        erased = v2.RandomErasing(random_erasing, scale=(0.02, 1 / 3), ratio=(0.3, 1 / 0.3), value=noise)  # timm's ranges
        self.erased = [erased] if random_erasing else []
        self.copies = repeated_augmentation
        self.alphas = (mixup_alpha, cutmix_alpha)

    def split(self, name: str) -> Dataset:
        """The raw (image, label) pairs of ``train``, ``val`` or ``test``."""
        return self._splits[name]

    def geometry(self) -> list[v2.Transform]:
        """The random geometric transforms."""
        return cropped_at_random(self.image_shape[1])

    def framing(self) -> list[v2.Transform]:
        """The deterministic transforms from a raw image to ``image_shape``; empty if it already has that shape."""
        return []

    def train_transform(self) -> v2.Compose:
        moved = self.geometry() if self.augment else self.framing()
        return v2.Compose([*moved, *self.varied, *normalised(self.statistics), *self.erased])

    def eval_transform(self) -> v2.Compose:
        return v2.Compose([*self.framing(), *normalised(self.statistics)])

    def setup(self, stage: str | None = None) -> None:
        """Reads nothing by default."""

    def zeros(self, size: int) -> tuple[Tensor, Tensor]:
        labels = torch.zeros(size, self.num_classes) if any(self.alphas) else torch.zeros(size, dtype=torch.int64)
        return torch.zeros(size, *self.image_shape), labels

    def fingerprint(self) -> dict[str, Any]:
        """The classes, and the number of samples of each part."""
        names = list(map(str, self.class_names))
        found: dict[str, Any] = {"classes": len(names), "names of classes": digest(*names)}
        for part in ("train", "val", "test"):
            with suppress(KeyError):  # a user's class needs no part that is not asked for
                found[f"samples of {part}"] = len(self.split(part))  # ty: ignore[invalid-argument-type]: torch declares no length
        return found

    def train_dataloader(self) -> ResumableLoader:
        seeded = SeededDataset(self.split("train"), self.train_transform(), self.seed)
        return self.training_loader(seeded, self.batch_size, copies=self.copies)

    def val_dataloader(self) -> Loader:
        return self._in_order("val")

    def test_dataloader(self) -> Loader:
        return self._in_order("test")

    def predict_dataloader(self) -> Loader:
        return self.test_dataloader()

    def on_after_batch_transfer(self, batch: tuple[Tensor, Tensor], dataloader_idx: int) -> tuple[Tensor, Tensor]:
        """Mixes training batches: MixUp (Zhang et al., 2018), CutMix (Yun et al., 2019), or one of the two."""
        if not any(self.alphas) or self.trainer is None or not self.trainer.training:
            return batch
        kinds = zip((v2.MixUp, v2.CutMix), self.alphas, strict=True)
        return v2.RandomChoice([kind(num_classes=self.num_classes, alpha=alpha) for kind, alpha in kinds if alpha])(*batch)

    def _in_order(self, part: str) -> Loader:
        return Loader(TransformedDataset(self.split(part), self.eval_transform()), self.batch_size, **self.loading)


class SizedImages(ImageDataModule):
    """Images of any size, cropped and resized to one.

    Args:
        image_size: height and width of an image after augmentation, in pixels
        processor: normalise as a published model does: its folder, with preprocessor_config.json or timm's config.json, or its
            name in timm; null: as for ImageNet. Weights for model=timm bring its name
        interpolation: how images are resized, bilinear or bicubic
        crop_scale: smallest share of an image that a random crop of training has
        randaugment: RandAugment as timm describes it, such as rand-m9-mstd0.5-inc1 (needs timm); null: none, or that of
            torchvision with randaugment_ops

    """

    statistics = IMAGENET

    def __init__(
        self,
        image_size: int = 224,
        processor: str | None = None,
        interpolation: Literal["bilinear", "bicubic"] = "bilinear",
        crop_scale: float = 0.08,
        randaugment: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        require_at_least(1, image_size=image_size)
        require_one_of(INTERPOLATIONS, interpolation=interpolation)
        require_within(0, 1, closed=True, crop_scale=crop_scale)
        self.image_shape = (3, image_size, image_size)
        self.interpolation, self.crop_scale, self.crop_pct = interpolation, crop_scale, crop_pct(image_size)
        if processor is not None:
            self.statistics = statistics_of(processor)
        if randaugment is not None:
            self.varied.insert(0, TimmRandAugment(randaugment, self.statistics[0], interpolation))

    def geometry(self) -> list[v2.Transform]:
        size = self.image_shape[1]
        framed = self.framing() if size <= SMALL else coloured(3)
        return [*framed, *cropped_at_random(size, interpolation=self.interpolation, crop_scale=self.crop_scale)]

    def framing(self) -> list[v2.Transform]:
        return resized(*self.image_shape[:2], self.interpolation)


def held_out(dataset: Dataset, labels: Tensor, fraction: float) -> tuple[Labelled, Labelled]:
    """Splits samples and their labels (N,) in two, with ``fraction`` of every class in the second part.

    The split is the same for every seed of a run.
    """
    generator = torch.Generator().manual_seed(0)
    out = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        members = (labels == label).nonzero().flatten()
        members = members[torch.randperm(len(members), generator=generator)]
        out[members[: round(len(members) * fraction)]] = True
    first, second = ((Subset(dataset, part.nonzero().flatten().tolist()), labels[part]) for part in (~out, out))
    return first, second


class ChosenClasses:
    """Some or all of the classes, and a part of the training set for validation unless the data have one.

    To be listed before :class:`ImageDataModule` among the base classes. ``setup`` calls :meth:`split_classes`.

    Args:
        val_fraction: fraction of the training set that is used for validation
        classes: classes to keep, by name or number, such as [0, 1]; []: all
    """

    def __init__(self, val_fraction: float = 0.1, classes: Sequence[int | str] = (), **options: Any) -> None:
        super().__init__(**options)
        require_within(0, 1, val_fraction=val_fraction)
        self.val_fraction, self.classes = val_fraction, classes
        if len(classes) > 1:  # a single one is refused in setup
            self.num_classes = len(classes)

    def split_classes(self, names: Sequence[str], **parts: Labelled) -> None:
        """Takes the chosen ones of all classes, ``names``, out of the parts: ``train``, and ``val`` and ``test`` if there are
        such. Sets ``class_names`` and ``num_classes``.

        Raises:
            UserError: a class does not exist or is given twice, or only one is given.
        """
        chosen = chosen_classes(self.classes, names)
        self.class_names, self.num_classes = [names[index] for index in chosen], len(chosen)
        if "val" not in parts:
            parts["train"], parts["val"] = held_out(*parts["train"], self.val_fraction)
        parts.setdefault("test", parts["val"])
        self._splits = {part: OfClasses(*each, chosen) for part, each in parts.items()}
