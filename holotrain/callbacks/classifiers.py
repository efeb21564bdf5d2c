"""Predictions and ConfusionMatrix: what a classifier says of its validation data, from the outputs of its validation."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from PIL import Image
from torch import Tensor, nn
from torchmetrics.classification import MulticlassConfusionMatrix
from torchvision.transforms.v2 import functional as F

from holotrain.callbacks import drawing
from holotrain.numeric import require_at_least


class OutputsSeen(pl.Callback):
    """Passes each evaluated batch with its probabilities to :meth:`seen`, for modules that call ``self(...)`` in their step.

    A method ``probabilities`` of the module maps its outputs to probabilities (B, classes). Without one they are the softmax of
    logits (B, classes).
    """

    _hook: Any = None
    _outputs: Tensor | None = None

    @abstractmethod
    def seen(self, trainer: pl.Trainer, batch: Any, labels: Tensor, probabilities: Tensor, batch_idx: int) -> None:
        """One batch, its labels (B,) and probabilities (B, classes)."""

    def watch(self, module: nn.Module) -> None:
        self.leave()
        self._hook = module.register_forward_hook(self._keep)

    def leave(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook = self._outputs = None

    def _keep(self, module: nn.Module, given: tuple, outputs: Any) -> None:
        # With DDP the hook also runs around the whole step, which returns something else or nothing.
        if isinstance(outputs, Tensor) and outputs.ndim == 2 and outputs.is_floating_point():
            self._outputs = outputs.detach()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.watch(pl_module)

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        logits, self._outputs = self._outputs, None
        labels = labels_of(batch)
        if dataloader_idx == 0 and logits is not None and labels is not None and len(labels) == len(logits):
            probabilities = getattr(pl_module, "probabilities", lambda x: x.float().softmax(-1))
            self.seen(trainer, batch, labels, probabilities(logits), batch_idx)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.leave()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.leave()


def labels_of(batch: Any) -> Tensor | None:
    """The labels (B,) of a batch, (inputs, labels) or a dictionary with ``labels``; None if it has none."""
    if isinstance(batch, dict):
        labels = batch.get("labels")
    else:  # a TensorDataset of inputs alone gives lists of one tensor
        labels = batch[1] if isinstance(batch, list | tuple) and len(batch) > 1 else None
    return labels if isinstance(labels, Tensor) and labels.ndim == 1 and not labels.is_floating_point() else None


def names_of(trainer: pl.Trainer, given: Sequence[str] | None, classes: int) -> list[str]:
    """Names of the classes: as given, else those of the data module, else their numbers."""
    names = given or getattr(trainer.datamodule, "class_names", None) or []  # ty: ignore[missing-attribute]
    return [str(name) for name in names] if len(names) == classes else [str(index) for index in range(classes)]


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

    Logs ``val/predictions``.
    """

    def __init__(
        self,
        count: int = 9,
        class_names: Sequence[str] | None = None,
        statistics: tuple[Sequence[float], Sequence[float]] | None = None,
    ) -> None:
        require_at_least(1, count=count)
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
        statistics = self.statistics or getattr(trainer.datamodule, "statistics", None)  # ty: ignore[missing-attribute]
        names = names_of(trainer, self.class_names, len(kept[0][2]))
        pictures, captions = [], []
        for image, label, probabilities in kept:
            probability, predicted = probabilities.max(0)
            label, predicted = int(label), int(predicted)
            colour = drawing.GREEN if label == predicted else drawing.RED
            pictures.append(picture_of(image, statistics))
            share = f", {100 * probability.item():.0f}%"
            captions.append([(f"label {names[label]}", "", drawing.INK), (f"predicted {names[predicted]}", share, colour)])
        drawing.log_image(trainer.loggers, "val/predictions", drawing.grid(pictures, captions), trainer.global_step)


def rows_of(batch_idx: int, size: int, batches: float, count: int) -> list[int]:
    """The rows of a batch to show, so that ``count`` rows are spread over all batches; of an endless loader the first batch."""
    known = 1 if batches == float("inf") else int(batches)
    wanted = sum(place * known // count == batch_idx for place in range(count))
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


class ConfusionMatrix(OutputsSeen):
    """Logs a picture of the confusion matrix after each validation and test, in percent of each class.

    For classifiers in any Lightning Trainer: batches are (inputs, labels (B,)) or dictionaries with ``labels``, and
    ``validation_step`` and ``test_step`` call ``self(...)``. Those outputs are counted, so nothing is computed again.

    Args:
        max_classes: with more classes than this, it draws nothing.
        class_names: None: those of the data module, or numbers.

    Logs ``val/confusion_matrix`` and ``test/confusion_matrix``, over the first loader, and over all processes.

    Attributes:
        image: the last picture; None before the first.
    """

    def __init__(self, max_classes: int = 100, class_names: Sequence[str] | None = None) -> None:
        self.max_classes = max_classes
        self.class_names = class_names
        self.image: Image.Image | None = None
        self._counts: MulticlassConfusionMatrix | None = None

    def seen(self, trainer: pl.Trainer, batch: Any, labels: Tensor, probabilities: Tensor, batch_idx: int) -> None:
        classes = probabilities.shape[1]
        if classes > self.max_classes:
            return
        if self._counts is None:
            self._counts = MulticlassConfusionMatrix(classes, validate_args=False).to(labels.device)
        self._counts.update(probabilities.argmax(1), labels)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._draw(trainer, "val/confusion_matrix")

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.watch(pl_module)

    on_test_batch_end, on_test_end = OutputsSeen.on_validation_batch_end, OutputsSeen.on_validation_end

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._draw(trainer, "test/confusion_matrix")

    def _draw(self, trainer: pl.Trainer, tag: str) -> None:
        counted, self._counts = self._counts, None
        if counted is None:
            return
        counts = counted.compute().cpu().numpy()  # over all processes
        if trainer.is_global_zero:
            self.image = drawing.matrix(counts, names_of(trainer, self.class_names, len(counts)))
            drawing.log_image(trainer.loggers, tag, self.image, trainer.global_step)
