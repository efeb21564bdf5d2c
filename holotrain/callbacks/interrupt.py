"""SaveOnSignal: SIGTERM and Ctrl-C end a training only after a checkpoint from which it continues exactly."""

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint

from holotrain.callbacks.agreement import Agreement
from holotrain.callbacks.whole_steps import gradients_pending, validation_follows


class Interrupted(Exception):
    """A signal ended the training, after a checkpoint.

    Attributes:
        signum: the signal.
        checkpoint: where the training can continue.
    """

    def __init__(self, signum: int, checkpoint: Path) -> None:
        super().__init__(f"{signal.Signals(signum).name} ended the training; its state is in {checkpoint}")
        self.signum = signum
        self.checkpoint = checkpoint


class SaveOnSignal(Checkpoint):
    """On SIGTERM or SIGINT finishes the optimizer step, saves a checkpoint and raises ``Interrupted``.

    With ``accumulate_grad_batches`` it finishes the accumulated batch. It also finishes a validation that follows the step,
    and the epoch after its last batch. The same signal once more ends the process at once. Of several processes all stop at
    the same batch, no matter which of them received the signal. It is a ``Checkpoint`` to Lightning, so that it runs after the
    callbacks whose state it saves.

    Args:
        path: file of the checkpoint.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.received: int | None = None
        self._agreement: Agreement | None = None
        self._previous: dict[int, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._agreement = Agreement(getattr(trainer.strategy, "_timeout", None))
        if threading.current_thread() is threading.main_thread():
            self._previous = {signum: signal.signal(signum, self._note) for signum in self.SIGNALS}

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # From a checkpoint made at an epoch's last batch Lightning would lose an epoch, from one made before a validation
        # that validation. Both are followed by a better place.
        if trainer.is_last_batch:
            return
        agreed = self._agreement.late(self.received or 0)
        if not (gradients_pending(trainer) or validation_follows(trainer)):
            self._save_and_raise(trainer, agreed)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._agreement is not None and not (trainer.sanity_checking or trainer.is_last_batch):
            self._save_and_raise(trainer, self._agreement.now(self.received or 0))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._save_and_raise(trainer, self._agreement.now(self.received or 0))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._agreement.end()
        self._restore()  # before Lightning (2.6) restores what it found: the teardown of callbacks comes after that

    def _save_and_raise(self, trainer: pl.Trainer, signum: int) -> None:
        if signum:
            trainer.save_checkpoint(self.path)
            raise Interrupted(signum, self.path)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._restore()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.received = signum
        signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)

    def _restore(self) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())
