"""Image classification as a LightningModule."""

from typing import Any

from torch import Tensor

from holotrain.tasks.classification import Classifier


class ImageClassifier(Classifier):
    """Trains any module that maps images (B, channels, height, width) to logits (B, classes).

    Takes the arguments of :class:`~holotrain.tasks.classification.Classifier`. Batches are (images, labels), with class
    indices (B,) or probabilities (B, classes) (MixUp, CutMix) as labels. For predictions the labels are ignored.
    """

    def inputs(self, batch: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        images, labels = batch
        return images, labels
