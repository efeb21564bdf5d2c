"""What both kinds of language modelling share: sums over the tokens of an evaluation, and metrics computed from them."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import SumMetric

from holotrain.tasks.task import Task


class LanguageModelling(Task):
    """A task whose metrics are quotients of sums: nats per token, nats per byte.

    A mean over batches would be wrong, because batches differ in size, and undefined for a batch without any bytes.
    """

    SUMS: tuple[str, ...]
    """The names of the sums that ``summed`` returns."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        # In fp64: the sums of a large corpus are too large to add to in fp32.
        self.sums = nn.ModuleDict(
            {f"{split}_sums": nn.ModuleDict({name: _sum() for name in self.SUMS}) for split in ("val", "test")}
        )

    @abstractmethod
    def summed(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """The sums of one batch."""

    @abstractmethod
    def reported(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """The metrics of all batches, without the name of the split."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._add("val", batch, batch_idx)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._add("test", batch, batch_idx)

    def _add(self, split: str, batch: dict[str, Tensor], batch_idx: int) -> None:
        for name, value in self.summed(batch, batch_idx).items():
            self.sums[f"{split}_sums"][name].update(value)

    def on_validation_epoch_end(self) -> None:
        self._report("val")

    def on_test_epoch_end(self) -> None:
        self._report("test")

    def _report(self, split: str) -> None:
        sums = {name: metric.compute() for name, metric in self.sums[f"{split}_sums"].items()}
        metrics = {f"{split}/{name}": value.float() for name, value in self.reported(sums).items()}
        self.log_dict(metrics, prog_bar=split == "val")
        for metric in self.sums[f"{split}_sums"].values():
            metric.reset()


def _sum() -> SumMetric:
    return SumMetric().set_dtype(torch.float64)
