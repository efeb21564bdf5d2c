"""What classification tasks share: loss, accuracy, predictions."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from holotrain.ranges import require_within
from holotrain.tasks.task import Task


class Classifier(Task):
    """Trains a model that gives logits (B, classes).

    Args:
        model: the model to train
        classes: number of classes
        label_smoothing: share of each target that is spread over all classes
        options: those of :class:`~holotrain.tasks.task.Task`

    A subclass defines ``inputs``, which takes a batch and returns the model's arguments, then the labels: class indices (B,)
    or probabilities (B, classes).

    Logs ``val/loss``, ``val/accuracy``, ``test/loss`` and ``test/accuracy`` per epoch, and with more than ten classes also
    ``val/accuracy_top5`` and ``test/accuracy_top5``.

    Raises:
        ValueError: ``label_smoothing`` outside of [0, 1).
    """

    def __init__(self, model: nn.Module, classes: int, label_smoothing: float = 0.0, **options: Any) -> None:
        super().__init__(model, **options)
        require_within(0, 1, label_smoothing=label_smoothing)
        self.label_smoothing = label_smoothing
        accuracies = {"accuracy": MulticlassAccuracy(classes, average="micro")}
        if classes > 10:
            accuracies["accuracy_top5"] = MulticlassAccuracy(classes, average="micro", top_k=5)
        self.metrics = nn.ModuleDict(
            {f"{split}_metrics": MetricCollection(accuracies, prefix=f"{split}/").clone() for split in ("val", "test")}
        )

    @property
    def monitored(self) -> dict[str, str]:
        return {**dict.fromkeys(self.metrics["val_metrics"].keys(), "max"), "val/loss": "min"}

    def forward(self, *inputs: Tensor | None) -> Tensor:
        return self.model(*inputs)

    def loss(self, *inputs: Tensor | None) -> Tensor:
        *given, labels = inputs
        return self.criterion(self(*given), labels, self.label_smoothing)

    def criterion(self, outputs: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """The mean loss of the model's outputs (B, classes)."""
        return F.cross_entropy(outputs, labels, label_smoothing=label_smoothing)

    def scores(self, outputs: Tensor) -> Tensor:
        """A score of each class, (B, classes); the highest is the likeliest class."""
        return outputs

    def probabilities(self, outputs: Tensor) -> Tensor:
        """The probability of each class, (B, classes)."""
        return outputs.float().softmax(-1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("test", batch)

    def _evaluate(self, split: str, batch: Any) -> None:
        *given, labels = self.inputs(batch)
        outputs = self(*given)
        metrics = self.metrics[f"{split}_metrics"]
        metrics.update(self.scores(outputs), labels)
        shown = {"prog_bar": split == "val", "on_epoch": True, "sync_dist": True, "batch_size": len(labels)}
        self.log(f"{split}/loss", self.criterion(outputs, labels), **shown)
        self.log_dict(metrics, prog_bar=split == "val", batch_size=len(labels))

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Returns the likeliest class of each sample, ``class`` (B,), and its probability, ``probability`` (B,)."""
        *given, _ = self.inputs(batch)
        probability, index = self.probabilities(self(*given)).max(-1)
        return {"class": index, "probability": probability}
