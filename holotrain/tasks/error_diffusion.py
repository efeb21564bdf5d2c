"""Classification of images by error diffusion, as a LightningModule."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from holotrain.models.error_diffusion import ImageErrorDiffusion
from holotrain.tasks.image_classification import ImageClassifier


class ErrorDiffusionClassifier(ImageClassifier):
    """Trains networks of excitatory and inhibitory cells by half the squared error of their outputs: Kaneko's ED method.

    The model's backward gives updates in the place of gradients, and an optimizer steps along them: SGD without momentum is
    the published method, its learning rate Kaneko's alpha (over the mean of a batch).

    Args:
        model: outputs (B, classes) in (0, 1), each of a network that answers for its class; for two classes (B, 1).
        classes: how many there are.
        clamp_signs: set weights to 0, after every step, that have lost the sign of their cells.
        options: those of :class:`~holotrain.tasks.classification.Classifier`.

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
        """The one output is the second class's."""
        return torch.cat([1 - outputs, outputs], dim=1) if outputs.shape[1] == 1 else outputs

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Each one's share of their sum, as outputs know nothing of each other."""
        scores = self.scores(outputs.float())
        return scores / scores.sum(1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.clamp_signs:
            self.model.clamp_signs()
