"""Classification of images and of texts, as LightningModules: loss, accuracy, metrics of torchmetrics, predictions."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torchmetrics.classification
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from holotrain.error_diffusion import ImageErrorDiffusion
from holotrain.errors import UserError
from holotrain.numeric import counted, require_within
from holotrain.tasks.language import attended
from holotrain.tasks.task import Task


class Classifier(Task):
    """Trains a model that gives logits (B, classes).

    Args:
        model: the model to train
        classes: number of classes
        label_smoothing: share of each target that is spread over all classes
        metrics: more metrics of torchmetrics, such as {f1: F1Score, recall: {metric: Recall, average: micro}}, logged as val/f1

    A subclass defines ``inputs``, which takes a batch and returns the model's arguments, then the labels: class indices (B,)
    or probabilities (B, classes).

    Logs ``val/loss``, ``val/accuracy``, ``test/loss`` and ``test/accuracy`` per epoch, and with more than ten classes also
    ``val/accuracy_top5`` and ``test/accuracy_top5``.

    Raises:
        ValueError: ``label_smoothing`` outside of [0, 1), or a metric that torchmetrics does not have.
    """

    predicts_all = False

    def __init__(
        self,
        model: nn.Module,
        classes: int,
        label_smoothing: float = 0.0,
        metrics: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        require_within(0, 1, label_smoothing=label_smoothing)
        self.label_smoothing, self.classes = label_smoothing, classes
        evaluated = MetricCollection({"accuracy": MulticlassAccuracy(classes, average="micro")})
        if classes > 10:
            evaluated.add_metrics({"accuracy_top5": MulticlassAccuracy(classes, average="micro", top_k=5)})
        evaluated.add_metrics(named_metrics(metrics or {}, classes))
        self.val_metrics, self.test_metrics = evaluated.clone("val/"), evaluated.clone("test/")

    @property
    def monitored(self) -> dict[str, str]:
        return {name: direction(metric) for name, metric in self.val_metrics.items()} | {"val/loss": "min"}

    def loss(self, *inputs: Tensor) -> Tensor:
        *arguments, labels = inputs
        return self.criterion(self(*arguments), labels, self.label_smoothing)

    def criterion(self, outputs: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """The mean loss of the model's outputs (B, classes). Raises a UserError if they are of another number of classes."""
        if outputs.shape[1] != self.classes:
            kind, found = type(self.model).__name__, counted(outputs.shape[1], "output")
            raise UserError(f"model: a {kind} with {found} does not fit the data, which have {counted(self.classes, 'class')}")
        return F.cross_entropy(outputs, labels, label_smoothing=label_smoothing)

    def scores(self, outputs: Tensor) -> Tensor:
        """A score of each class, (B, classes); the highest is the likeliest class."""
        return outputs

    def probabilities(self, outputs: Tensor) -> Tensor:
        """The probability of each class, (B, classes)."""
        return outputs.float().softmax(-1)

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return self._evaluate("val", self.val_metrics, batch)

    def test_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return self._evaluate("test", self.test_metrics, batch)

    def _evaluate(self, split: str, metrics: MetricCollection, batch: Any) -> dict[str, Tensor]:
        """Returns ``probabilities`` (B, classes) and ``labels`` (B,), for callbacks."""
        *arguments, labels = self.inputs(batch)
        outputs = self(*arguments)
        metrics.update(self.scores(outputs), labels)
        shown = {"prog_bar": split == "val", "batch_size": len(labels)}
        self.log(f"{split}/loss", self.criterion(outputs, labels), on_epoch=True, sync_dist=True, **shown)
        self.log_dict(metrics, **shown)  # ty: ignore[invalid-argument-type]
        return {"probabilities": self.probabilities(outputs), "labels": labels}

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Returns the likeliest class of each sample, ``class`` (B,), its probability, ``probability`` (B,), and, if
        ``predicts_all``, the ``probabilities`` (B, classes)."""
        *arguments, _ = self.inputs(batch)
        probabilities = self.probabilities(self(*arguments))
        probability, index = probabilities.max(-1)
        found = {"class": index, "probability": probability}
        return found | {"probabilities": probabilities} if self.predicts_all else found


class ImageClassifier(Classifier):
    """Trains any module that maps images (B, channels, height, width) to logits (B, classes).

    Batches are (images, labels), with class indices (B,) or probabilities (B, classes) (MixUp, CutMix) as labels. For
    predictions the labels are ignored.
    """

    def inputs(self, batch: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        images, labels = batch
        return images, labels


class SequenceClassifier(Classifier):
    """Trains any module that maps tokens (B, T) and a mask (B, T), False for padding, to logits (B, classes).

    Batches are dictionaries of ``tokens`` (B, T), ``lengths`` (B,) and ``labels`` (B,); predictions need no labels.
    """

    def inputs(self, batch: dict[str, Any]) -> tuple[Any, ...]:
        return batch["tokens"], *attended(batch, self.model), batch.get("labels")

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Tensor]:
        """The likeliest class and its probability, and ``index`` (B,), the number of each sample, if the batch has it."""
        numbered = {"index": batch["index"]} if "index" in batch else {}
        return super().predict_step(batch, batch_idx) | numbered


class ErrorDiffusionClassifier(ImageClassifier):
    """Trains networks of excitatory and inhibitory cells on half the squared error of their outputs: Kaneko's ED method.

    The model's backward returns updates instead of gradients, and the optimizer applies them. SGD without momentum is the
    published method; its learning rate is Kaneko's alpha (for the mean over a batch).

    Args:
        model: outputs (B, classes) in (0, 1), one network for each class; for two classes (B, 1)
        classes: number of classes
        clamp_signs: after each step, set weights to 0 whose sign does not match their cells

    ``val/loss`` and ``test/loss`` are half the squared error, summed over outputs.
    """

    model: ImageErrorDiffusion

    def __init__(self, model: ImageErrorDiffusion, classes: int, clamp_signs: bool = False, **options: Any) -> None:
        super().__init__(model, classes, **options)
        if clamp_signs and model.rule == "kaneko":
            raise ValueError("clamp_signs: rule=kaneko never changes a sign; use article or backpropagation")
        self.clamp_signs = clamp_signs

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


MULTICLASS = "Multiclass"
"""With what the names of the classes begin."""

TAKEN = ("loss", "accuracy", "accuracy_top5")
"""What every classification logs under these names."""


def named_metrics(named: Mapping[str, Any], classes: int) -> dict[str, Any]:
    """The metrics of a classification by their names.

    Args:
        named: for each name a metric of torchmetrics, such as ``F1Score``, or a mapping of ``metric`` and its other arguments.

    Raises:
        ValueError: a name cannot be logged, torchmetrics has no such metric, refuses an argument, or gives several numbers.
    """
    return {name: _checked(name, chosen, classes) for name, chosen in named.items()}


def _checked(name: str, chosen: Any, classes: int) -> Metric:
    if not isinstance(name, str) or not name.isidentifier() or name in TAKEN:
        raise ValueError(f"metrics: {name!r} is no name for a metric; use letters, and none of {', '.join(TAKEN)}")
    options = {"metric": chosen} if isinstance(chosen, str) else dict(chosen) if isinstance(chosen, Mapping) else {}
    kind = getattr(torchmetrics.classification, f"{MULTICLASS}{options.pop('metric', None)}", None)
    if kind is None:
        known = [each.removeprefix(MULTICLASS) for each in dir(torchmetrics.classification) if each.startswith(MULTICLASS)]
        raise ValueError(f"metrics: {name}: {chosen!r} names no metric of torchmetrics; use one of {', '.join(known)}")
    try:
        with torch.device("cpu"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a class without a sample
            tried = kind(num_classes=classes, **options)
            tried.update(torch.zeros(2, classes), torch.tensor([0, 1 % classes]))
            result = tried.compute()
        if isinstance(result, torch.Tensor) and result.ndim == 0:
            return kind(num_classes=classes, **options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"metrics: {name}: {error}") from error
    raise ValueError(f"metrics: {name}: {kind.__name__.removeprefix(MULTICLASS)} gives more than one number")


def direction(metric: Metric) -> str:
    """``min`` or ``max``, whichever is better. torchmetrics leaves it open where higher is better, as for Specificity."""
    return "min" if metric.higher_is_better is False else "max"
