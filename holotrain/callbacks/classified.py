"""What callbacks that look at a classifier's validation share: its outputs, without computing them again."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn


class OutputsSeen(pl.Callback):
    """Passes each evaluated batch with its probabilities to :meth:`seen`, for modules that call ``self(...)`` in their step.

    Args:
        probabilities: maps the module's outputs (B, ...) to probabilities (B, classes); None: the module's method of this
            name, or else the softmax of logits (B, classes).
    """

    def __init__(self, probabilities: Callable[[Tensor], Tensor] | None = None) -> None:
        self.probabilities = probabilities
        self._hook: Any = None
        self._outputs: Tensor | None = None

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
        if self._hook is None or dataloader_idx != 0 or logits is None or labels is None:
            return
        if len(labels) == len(logits):
            probabilities = self.probabilities or getattr(pl_module, "probabilities", softmax)
            self.seen(trainer, batch, labels, probabilities(logits), batch_idx)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.leave()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.leave()


def softmax(logits: Tensor) -> Tensor:
    return logits.float().softmax(-1)


def labels_of(batch: Any) -> Tensor | None:
    """The labels (B,) of a batch, (inputs, labels) or a dictionary with ``labels``; None if it has none."""
    labels = batch.get("labels") if isinstance(batch, dict) else batch[1] if isinstance(batch, list | tuple) else None
    return labels if isinstance(labels, Tensor) and labels.ndim == 1 and not labels.is_floating_point() else None


def names_of(trainer: pl.Trainer, given: list[str] | None, classes: int) -> list[str]:
    """Names of the classes: as given, else those of the data module, else their numbers."""
    names = given or getattr(trainer.datamodule, "class_names", None) or []
    return [str(name) for name in names] if len(names) == classes else [str(index) for index in range(classes)]
