"""Image classification as a LightningModule."""

from collections.abc import Callable

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from holotrain.reversible import GraphedStep


class ImageClassifier(pl.LightningModule):
    """Trains any module that maps images to logits.

    Args:
        model: images (B, channels, height, width) -> logits (B, classes).
        classes: how many there are.
        optimizer: makes the optimizer of a model; None if the module is only evaluated.
        scheduler: makes the schedule of an optimizer and a number of optimizer steps; it is stepped after each of them.
        label_smoothing: in [0, 1).
        cuda_graph: capture forward and backward once and replay them
            (:class:`~holotrain.reversible.GraphedStep`): on a CUDA device, without accumulation and without scaled gradients.

    Batches are (images, labels): labels (B,) of class indices, or (B, classes) of probabilities (MixUp, CutMix).

    Logs ``train/loss`` and ``train/lr`` by step, ``val/loss``, ``val/accuracy``, ``test/loss``, ``test/accuracy`` by epoch,
    and ``..._top5`` beside the accuracies where there are more than ten classes.
    """

    def __init__(
        self,
        model: nn.Module,
        classes: int,
        optimizer: Callable[[nn.Module], Optimizer] | None = None,
        scheduler: Callable[[Optimizer, int], LRScheduler] | None = None,
        label_smoothing: float = 0.0,
        cuda_graph: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self.label_smoothing = label_smoothing
        self._graphed = GraphedStep(self._loss, model.parameters()) if cuda_graph else None
        accuracies = {"accuracy": MulticlassAccuracy(classes, average="micro")}
        if classes > 10:
            accuracies["accuracy_top5"] = MulticlassAccuracy(classes, average="micro", top_k=5)
        self.metrics = nn.ModuleDict(
            {f"{split}_metrics": MetricCollection(accuracies, prefix=f"{split}/").clone() for split in ("val", "test")}
        )

    @property
    def monitored(self) -> list[str]:
        """The validation metrics, by which a best checkpoint can be chosen."""
        return ["val/loss", *self.metrics["val_metrics"].keys()]

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = (self._graphed or self._loss)(images, labels)
        # Lightning's log takes a few per cent of a small model's step: it is called where its value will be read.
        if (self.trainer.global_step + 1) % self.trainer.log_every_n_steps == 0 or self.trainer.is_last_batch:
            self.log("train/loss", loss, prog_bar=True, batch_size=len(images))
            self.log("train/lr", self.optimizers().param_groups[0]["lr"], batch_size=len(images))
        return loss

    def _loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self(images), labels, label_smoothing=self.label_smoothing)

    def backward(self, loss: Tensor) -> None:
        if self._graphed is None:  # a graphed step has already differentiated
            super().backward(loss)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        if self._graphed is None:  # a graphed step overwrites gradients, and Lightning comes here after it
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("test", batch)

    def _evaluate(self, split: str, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        logits = self(images)
        metrics = self.metrics[f"{split}_metrics"]
        metrics.update(logits, labels)
        shown = {"prog_bar": split == "val", "on_epoch": True, "sync_dist": True, "batch_size": len(images)}
        self.log(f"{split}/loss", F.cross_entropy(logits, labels), **shown)
        self.log_dict(metrics, prog_bar=split == "val", batch_size=len(images))

    def predict_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> dict[str, Tensor]:
        """Returns the likeliest class of each image, ``class`` (B,), and its probability, ``probability`` (B,)."""
        probability, index = self(batch[0]).float().softmax(-1).max(-1)
        return {"class": index, "probability": probability}

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.model)
        if self.make_scheduler is None:
            return optimizer
        scheduler = self.make_scheduler(optimizer, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
