"""Image classification as a LightningModule."""

from typing import Any

from torch import Tensor

from holotrain.tasks.classification import Classifier


class ImageClassifier(Classifier):
    """Trains any module that maps images (B, channels, height, width) to logits (B, classes).

    Takes the arguments of :class:`~holotrain.tasks.classification.Classifier`. Batches are (images, labels): labels (B,) of
    class indices, or (B, classes) of probabilities (MixUp, CutMix); in a prediction anything may stand beside the images.
    """

    def inputs(self, batch: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        images, labels = batch
        return images, labels
