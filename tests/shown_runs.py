"""Small trainings whose losses and weights are compared with and without a callback, and what they logged to TensorBoard."""

import io
from pathlib import Path

import lightning.pytorch as pl
import torch
from compared import assert_equal
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image
from small_trainings import quiet_trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData  # ty: ignore[missing-module-member]
from torch import nn

from holotrain.data import Digits
from holotrain.tasks import ImageClassifier


class DropoutNet(nn.Sequential):
    """Draws random numbers in training, so that a callback that draws too would show."""

    def __init__(self, classes=10):
        super().__init__(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, classes))


class Losses(pl.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(outputs["loss"].item())


def images():
    torch.manual_seed(0)
    return ImageClassifier(DropoutNet(), classes=10, optimizer=adamw), Digits(batch_size=64, val_fraction=0.2)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def fit(task, data, callbacks, folder=None, logger=None, **options):
    """Returns the trainer and the losses of all steps."""
    losses = Losses()
    loggers = [logger] if logger else [TensorBoardLogger(folder, name="tensorboard", version="")] if folder else False
    torch.manual_seed(1)
    usual = {"max_epochs": 2, "limit_train_batches": 4, "log_every_n_steps": 2, "num_sanity_val_steps": 1}
    trainer = quiet_trainer(**usual | options, logger=loggers, callbacks=[losses, *callbacks])
    trainer.fit(task, datamodule=data)
    return trainer, losses.seen


def assert_trains_as_without(callbacks: list[pl.Callback], folder: Path, make=images, **options) -> None:
    """The losses and weights are bit for bit those of a training without the callbacks."""
    task, data = make()
    _, losses = fit(task, data, callbacks, folder, **options)
    plain, data = make()
    _, expected = fit(plain, data, [], folder / "plain", **options)
    assert losses == expected and len(losses) == 8
    assert_equal(task.state_dict(), plain.state_dict())


class Logged:
    """What TensorBoard's files in a folder hold, as (step, value) for each tag."""

    def __init__(self, folder: Path) -> None:
        self.events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
        self.events.Reload()
        self.tags = self.events.Tags()

    def scalars(self, tag):
        return [(event.step, event.value) for event in self.events.Scalars(tag)]

    def images(self, tag):
        return [(event.step, Image.open(io.BytesIO(event.encoded_image_string))) for event in self.events.Images(tag)]

    def columns(self):
        """Those of HParams: the options and the results."""
        raw = self.events.summary_metadata["_hparams_/experiment"].plugin_data.content
        experiment = HParamsPluginData.FromString(raw).experiment
        return [each.name for each in experiment.hparam_infos], [each.name.tag for each in experiment.metric_infos]

    def texts(self, tag):
        found = self.events.Tensors(f"{tag}/text_summary")
        return [(event.step, event.tensor_proto.string_val[0].decode()) for event in found]
