"""Predictions: some validation images with what the model says of them."""

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from holotrain.callbacks import drawing
from holotrain.callbacks.classified import OutputsSeen, names_of
from holotrain.callbacks.media import log_image

TAG = "val/predictions"


class Predictions(OutputsSeen):
    """Logs a picture of some validation images at each validation: label, prediction and its probability.

    For image classifiers in any Lightning Trainer: batches are (images (B, C, H, W), labels (B,)), and ``validation_step``
    calls ``self(images)``. Those outputs are shown, so nothing is computed again. The images are spread over the first
    validation loader (of the first process, if there are several). They are the same at each validation if its order is.

    Args:
        count: number of images.
        class_names: None: those of the data module, or numbers.
        statistics: mean and standard deviation of each channel, with which images were normalised; None: those of the data
            module. If it has none, each image is scaled to its own range.
        probabilities: maps the module's outputs to probabilities (B, classes); None: the module's method of this
            name, or else softmax.

    Logs ``val/predictions``.
    """

    def __init__(
        self,
        count: int = 9,
        class_names: Sequence[str] | None = None,
        statistics: tuple[Sequence[float], Sequence[float]] | None = None,
        probabilities: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(probabilities)
        if count < 1:
            raise ValueError(f"count must be at least 1, not {count}")
        self.count = count
        self.class_names = class_names
        self.statistics = statistics
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._kept = []
        if trainer.loggers and trainer.is_global_zero:
            super().on_validation_start(trainer, pl_module)

    def seen(self, trainer: pl.Trainer, batch: Any, labels: Tensor, probabilities: Tensor, batch_idx: int) -> None:
        images = batch[0] if isinstance(batch, list | tuple) else None
        if isinstance(images, Tensor) and images.ndim == 4 and len(images) == len(labels):
            rows = rows_of(batch_idx, len(images), trainer.num_val_batches[0], self.count)
            self._kept += [(images[row].clone(), labels[row], probabilities[row]) for row in rows]

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        kept, self._kept = self._kept, []
        if not kept:
            return
        statistics = self.statistics or getattr(trainer.datamodule, "statistics", None)
        names = names_of(trainer, self.class_names, len(kept[0][2]))
        pictures, captions = [], []
        for image, label, probabilities in kept:
            probability, predicted = probabilities.max(0)
            label, predicted = int(label), int(predicted)
            colour = drawing.GREEN if label == predicted else drawing.RED
            pictures.append(picture_of(image, statistics))
            share = f", {100 * probability.item():.0f}%"
            captions.append([(f"label {names[label]}", "", drawing.INK), (f"predicted {names[predicted]}", share, colour)])
        log_image(trainer.loggers, TAG, drawing.grid(pictures, captions), trainer.global_step)


def rows_of(batch_idx: int, size: int, batches: float, count: int) -> list[int]:
    """The rows of a batch to show, so that ``count`` rows are spread over all batches; of an endless loader the first batch."""
    if batches == float("inf"):
        wanted = count if batch_idx == 0 else 0
    else:
        wanted = sum(place * int(batches) // count == batch_idx for place in range(count))
    return sorted({place * size // wanted for place in range(wanted)}) if wanted else []


def picture_of(image: Tensor, statistics: tuple[Sequence[float], Sequence[float]] | None) -> Image.Image:
    """An image (C, H, W), as it was before it was normalised. Anything but one or three channels is shown in grey."""
    image = image.detach().cpu().float().nan_to_num()
    if statistics is not None and len(statistics[0]) == len(image):
        mean, deviation = (torch.tensor(numbers, dtype=torch.float32)[:, None, None] for numbers in statistics)
        image = image * deviation + mean
    image = image if len(image) in (1, 3) else image.mean(0, keepdim=True)
    if statistics is None:
        image = (image - image.min()) / (image.max() - image.min()).clamp_min(torch.finfo(torch.float32).tiny)
    return F.to_pil_image((image.clamp(0, 1) * 255).round().to(torch.uint8)).convert("RGB")
