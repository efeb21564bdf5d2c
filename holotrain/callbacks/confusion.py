"""ConfusionMatrix: which classes a classifier takes for which."""

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
from PIL import Image
from torch import Tensor
from torchmetrics.classification import MulticlassConfusionMatrix

from holotrain.callbacks.classified import OutputsSeen, names_of
from holotrain.callbacks.drawing import matrix
from holotrain.callbacks.media import log_image


class ConfusionMatrix(OutputsSeen):
    """Logs a picture of the confusion matrix after each validation and test, in percent of each class.

    For classifiers in any Lightning Trainer: batches are (inputs, labels (B,)) or dictionaries with ``labels``, and
    ``validation_step`` and ``test_step`` call ``self(...)``. Those outputs are counted, so nothing is computed again.

    Args:
        max_classes: with more classes than this, it draws nothing.
        class_names: None: those of the data module, or numbers.
        probabilities: maps the module's outputs to probabilities (B, classes); None: the module's method of this
            name, or else softmax.

    Logs ``val/confusion_matrix`` and ``test/confusion_matrix``, over the first loader, and over all processes.

    Attributes:
        image: the last picture; None before the first.
    """

    def __init__(
        self,
        max_classes: int = 100,
        class_names: Sequence[str] | None = None,
        probabilities: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(probabilities)
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

    on_test_batch_end = OutputsSeen.on_validation_batch_end

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._draw(trainer, "test/confusion_matrix")

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.leave()

    def _draw(self, trainer: pl.Trainer, tag: str) -> None:
        counted, self._counts = self._counts, None
        if counted is None:
            return
        counts = counted.compute().cpu().numpy()  # over all processes
        if trainer.is_global_zero:
            self.image = matrix(counts, names_of(trainer, self.class_names, len(counts)))
            log_image(trainer.loggers, tag, self.image, trainer.global_step)
