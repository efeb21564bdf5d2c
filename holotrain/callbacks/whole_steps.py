"""Validation and the end of training wait until no gradients are pending, because checkpoints do not contain them."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop as TrainingEpochLoop


class WholeSteps(TrainingEpochLoop):
    """With ``accumulate_grad_batches``, validates and ends only after an optimizer step.

    Lightning (2.6) does both after any batch. Here a validation that is due within an accumulated batch runs after the
    optimizer step, once even if it was due several times.
    """

    @property
    def done(self) -> bool:
        return not self._should_accumulate() and super().done

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        if self._should_accumulate():
            return False
        return super()._should_check_val_fx(data_fetcher) or self._fell_due()

    def _fell_due(self) -> bool:
        """Whether ``val_check_interval`` ended within the accumulated batch that has just ended."""
        trainer = self.trainer
        interval = trainer.val_check_batch
        if interval in (None, float("inf")) or not self._should_check_val_epoch():
            return False
        batches = self.batch_progress.current.ready % trainer.accumulate_grad_batches or trainer.accumulate_grad_batches
        index = self.total_batch_idx if trainer.check_val_every_n_epoch is None else self.batch_idx
        return (index + 1) // interval > (index + 1 - batches) // interval


def wait_for_whole_steps(trainer: pl.Trainer) -> None:
    """Makes validations and requests to stop wait for the optimizer step, in the training of this trainer."""
    loop = trainer.fit_loop.epoch_loop
    if type(loop) is TrainingEpochLoop:
        loop.__class__ = WholeSteps  # in place, because the trainer has already set it up


def gradients_pending(trainer: pl.Trainer) -> bool:
    """Whether the current batch, or the one that just ended, has no optimizer step yet."""
    return trainer.fit_loop._should_accumulate()


def validation_follows(trainer: pl.Trainer) -> bool:
    """Whether a validation follows the batch that is ending, before the next batch."""
    return trainer.fit_loop.epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher)
