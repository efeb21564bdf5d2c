"""Classification of images by error diffusion, as a LightningModule."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from holotrain.models.image_error_diffusion import ImageErrorDiffusion
from holotrain.tasks.image_classification import ImageClassifier


class ErrorDiffusionClassifier(ImageClassifier):
    """Trains networks of excitatory and inhibitory cells on half the squared error of their outputs: Kaneko's ED method.

    The model's backward returns updates instead of gradients, and the optimizer applies them. SGD without momentum is the
    published method; its learning rate is Kaneko's alpha (for the mean over a batch).

    Args:
        model: outputs (B, classes) in (0, 1), one network for each class; for two classes (B, 1)
        classes: number of classes
        clamp_signs: after each step, set weights to 0 whose sign does not match their cells
        options: those of :class:`~holotrain.tasks.classification.Classifier`

    ``val/loss`` and ``test/loss`` are half the squared error, summed over outputs.
    """

    model: ImageErrorDiffusion

    def __init__(self, model: ImageErrorDiffusion, classes: int, clamp_signs: bool = False, **options: Any) -> None:
        super().__init__(model, classes, **options)
        self.clamp_signs = clamp_signs
        self.classes = classes

    def criterion(self, outputs: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
        targets = F.one_hot(labels, self.classes).float() if labels.ndim == 1 else labels
        targets = torch.lerp(targets, torch.full_like(targets, 1 / self.classes), label_smoothing)
        if outputs.shape[1] == 1:
            targets = targets[:, 1:]
        return 0.5 * (outputs - targets).square().sum(1).mean()

    def scores(self, outputs: Tensor) -> Tensor:
        """A single output is that of the second class."""
        return torch.cat([1 - outputs, outputs], dim=1) if outputs.shape[1] == 1 else outputs

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Each output divided by their sum, because the outputs are independent of each other."""
        scores = self.scores(outputs.float())
        return scores / scores.sum(1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.clamp_signs:
            self.model.clamp_signs()
