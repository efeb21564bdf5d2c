"""Classification of texts as a LightningModule."""

from torch import Tensor

from holotrain.tasks.classification import Classifier
from holotrain.tasks.padding import attended


class SequenceClassifier(Classifier):
    """Trains any module that maps tokens (B, T) and a mask (B, T), True where there is no padding, to logits (B, classes).

    Takes the arguments of :class:`~holotrain.tasks.classification.Classifier`. Batches are dictionaries of ``tokens`` (B, T),
    ``lengths`` (B,) and ``labels`` (B,), the last not needed for a prediction.
    """

    def inputs(self, batch: dict[str, Tensor]) -> tuple[Tensor | None, ...]:
        return batch["tokens"], attended(batch), batch.get("labels")

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """The likeliest class and its probability, and ``index`` (B,) where the batch has it: which sample each is."""
        numbered = {"index": batch["index"]} if "index" in batch else {}
        return super().predict_step(batch, batch_idx) | numbered
