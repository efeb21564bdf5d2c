"""Classification of texts as a LightningModule."""

from torch import Tensor

from holotrain.tasks.classification import Classifier
from holotrain.tasks.padding import attended


class SequenceClassifier(Classifier):
    """Trains any module that maps tokens (B, T) and a mask (B, T), False for padding, to logits (B, classes).

    Takes the arguments of :class:`~holotrain.tasks.classification.Classifier`. Batches are dictionaries of ``tokens`` (B, T),
    ``lengths`` (B,) and ``labels`` (B,); predictions need no labels.
    """

    def inputs(self, batch: dict[str, Tensor]) -> tuple[Tensor | None, ...]:
        return batch["tokens"], attended(batch, self.model), batch.get("labels")

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """The likeliest class and its probability, and ``index`` (B,), the number of each sample, if the batch has it."""
        numbered = {"index": batch["index"]} if "index" in batch else {}
        return super().predict_step(batch, batch_idx) | numbered
