"""SaveOnSignal: on a signal, such as SIGTERM or Ctrl-C, saves a checkpoint from which the training continues, then stops."""

import os
import signal
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from holotrain.checkpoints.exact_resume import gradients_pending, has_peers, validation_follows


class Interrupted(Exception):
    """A signal stopped the training after a checkpoint was saved.

    Attributes:
        signum: the signal.
        checkpoint: the file to continue from.
    """

    def __init__(self, signum: int, checkpoint: Path) -> None:
        super().__init__(f"{signal.Signals(signum).name} ended the training; its state is in {checkpoint}")
        self.signum = signum
        self.checkpoint = checkpoint


class SaveOnSignal(Checkpoint):
    """On SIGTERM, SIGINT, SIGHUP or SIGUSR1 finishes the optimizer step, saves a checkpoint and raises ``Interrupted``.

    With ``accumulate_grad_batches`` it finishes the accumulated batch. It also finishes a validation that follows the step,
    and the epoch after its last batch. It says so at once; a second signal of the same kind ends the process immediately. With
    several processes, all stop at the same batch, whichever received the signal. As a subclass of ``Checkpoint`` it runs
    after the callbacks whose state it saves.

    Args:
        path: file of the checkpoint.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)  # the last announces the end of a job on Slurm

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.received = 0
        self._signals: DelayedAllReduce
        self._previous: dict[int, Any] = {}
        self._leads = False
        self._in_epoch = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._signals = DelayedAllReduce(getattr(trainer.strategy, "_timeout", None))
        self._leads = trainer.is_global_zero
        if threading.current_thread() is threading.main_thread():
            ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()  # by nohup
            self._previous = {signum: signal.signal(signum, self._note) for signum in {*self.SIGNALS} - ignored}

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._in_epoch = True

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Lightning skips an epoch when it resumes from a checkpoint of the last batch, and a validation when it resumes from
        # one made before it. Both are followed by a better place to save.
        if trainer.is_last_batch:
            return
        signum = self._signals.delayed(self.received)
        if not (gradients_pending(trainer) or validation_follows(trainer)):
            self._save_and_raise(trainer, signum)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not (trainer.sanity_checking or trainer.is_last_batch):
            self._save_and_raise(trainer, self._signals.immediate(self.received))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._in_epoch = False
        self._save_and_raise(trainer, self._signals.immediate(self.received))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        signum = self._signals.immediate(self.received)  # while the files of the last epoch were written
        self._signals.end()
        self._restore()  # Lightning (2.6) restores the handlers that it found before it tears callbacks down
        self._save_and_raise(trainer, signum)

    def _save_and_raise(self, trainer: pl.Trainer, signum: int) -> None:
        if signum:
            trainer.save_checkpoint(self.path)
            raise Interrupted(signum, self.path)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._restore()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.received = signum
        signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
        if self._leads:
            name = signal.Signals(signum).name
            when = " when this step is complete" if self._in_epoch else ""
            words = f"holotrain: {name}: saving{when}; {name} again ends at once, without saving\n"
            with suppress(OSError):  # the same signal may have ended who reads this
                os.write(2, words.encode())  # print may be interrupted by itself

    def _restore(self) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())


class DelayedAllReduce:
    """The maximum over processes, one batch late, so that no process waits for the others.

    Every process must call the same methods in the same order. Uses its own gloo group on the CPU, so that no GPU is
    synchronized. A single process gets its own number immediately.

    Args:
        timeout: of the collectives; None: torch's default.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout)) if has_peers() else None
        self._maximum = torch.zeros(1, dtype=torch.int64)
        self._work: dist.Work | None = None

    def delayed(self, number: int) -> int:
        """The maximum of the previous call's numbers; 0 at the first call."""
        if self._group is None:
            return number
        previous, self._maximum = self._wait(), torch.tensor([number])
        self._work = dist.all_reduce(self._maximum, dist.ReduceOp.MAX, self._group, async_op=True)
        return previous

    def immediate(self, number: int) -> int:
        """The maximum of the numbers of this call and the previous one."""
        return max(self.delayed(number), self._wait())

    def end(self) -> None:
        """Waits for the pending collective and destroys the group."""
        self._wait()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _wait(self) -> int:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return int(self._maximum)
