"""Configurations to what they describe: data, model, task."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn

from holotrain import data as datasets
from holotrain.config.schema import RunConfig
from holotrain.config.schema.data import DataConfig
from holotrain.config.schema.model import BackwardConfig, ModelConfig
from holotrain.errors import UserError
from holotrain.models import RevViT, ViT, compile_blocks
from holotrain.tasks import ImageClassifier, optimizers, schedules

DATA = {
    "digits": datasets.Digits,
    "mnist": datasets.MNIST,
    "cifar10": datasets.CIFAR10,
    "cifar100": datasets.CIFAR100,
    "imagefolder": datasets.ImageFolder,
    "fake": datasets.Fake,
}
MODELS = {"vit": ViT, "rev_vit": RevViT}
OPTIMIZERS = {"adamw": optimizers.adamw, "sgd": optimizers.sgd}
SCHEDULES = {"cosine": schedules.cosine, "multistep": schedules.multistep, "constant": schedules.constant}


@contextmanager
def described_by(group: str) -> Iterator[None]:
    """A ValueError inside is a mistake in this group of the configuration."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"{group}: {error}") from error


def build_data(config: DataConfig, seed: int) -> datasets.ImageDataModule:
    """The data module; its data are read when it is set up, its classes and shape are known at once."""
    with described_by("data"):
        return DATA[config.kind](**_arguments(config), seed=seed)


def build_model(config: ModelConfig, backward: BackwardConfig, data: datasets.ImageDataModule) -> nn.Module:
    """The model for the images and classes of ``data``."""
    channels, size, _ = data.image_shape
    arguments = _arguments(config) | {"patch_size": config.patch_size or default_patch_size(size)}
    arguments |= {"backward": backward.kind, **backward.engine()}
    with described_by("model"):
        return MODELS[config.kind](image_size=size, channels=channels, classes=data.num_classes, **arguments)


def default_patch_size(image_size: int) -> int:
    """16 pixels as published for large images; less for small ones, so that some tens of tokens remain."""
    return 16 if image_size >= 112 else 4 if image_size >= 24 else 2


def build_task(config: RunConfig, data: datasets.ImageDataModule) -> ImageClassifier:
    """The LightningModule, its model included, with what it needs to train."""
    model = build_model(config.model, config.backward, data)
    if config.compile:
        compile_blocks(model)
    return ImageClassifier(
        model,
        classes=data.num_classes,
        optimizer=partial(OPTIMIZERS[config.optimizer.kind], **_arguments(config.optimizer)),
        scheduler=partial(SCHEDULES[config.scheduler.kind], **_arguments(config.scheduler)),
        label_smoothing=config.task.label_smoothing,
        cuda_graph=config.backward.cuda_graph,
    )


def _arguments(config: object) -> dict:
    return {name: value for name, value in vars(config).items() if name != "kind"}
