"""ExactCheckpoint: a ModelCheckpoint from each of whose files training continues exactly. WeightAverage: what else is saved."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn

from holotrain.checkpoints.exact_resume import gradients_pending, validation_follows, wait_for_whole_steps
from holotrain.numeric import require_at_least, require_within
from holotrain.reversible.reads import parts_of


class ExactCheckpoint(ModelCheckpoint):
    """Saves only where no gradients are pending, where no validation follows, and at an epoch's last batch after the epoch.

    Lightning (2.6) loses accumulated gradients, a validation or a whole epoch on continuing from elsewhere. Validations within
    an accumulated batch wait for its optimizer step. Takes the arguments of ModelCheckpoint.

    A checkpoint holds paths of the files that were saved before it. They are data: only files of this callback's own folder are
    ever removed.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._waiting: list[Callable[[], None]] = []
        wait_for_whole_steps(trainer)
        super().setup(trainer, pl_module, stage)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        best = {path: score for path, score in self.best_k_models.items() if self._is_own(path)}
        worst = max if self.mode == "min" else min
        while len(best) > self.save_top_k >= 0:  # save_top_k may be another than before
            del best[worst(best, key=best.__getitem__)]
        full = best and self.save_top_k in (-1, len(best))
        self.best_k_models, self.kth_best_model_path = best, worst(best, key=best.__getitem__) if full else ""
        if full:
            self.kth_value = best[self.kth_best_model_path]

    def _is_own(self, path: str) -> bool:
        if self.dirpath is None or "://" in path or Path(path).suffix != ".ckpt":
            return False
        return Path(path).resolve().parent == Path(self.dirpath).resolve()

    def _should_remove_checkpoint(self, trainer: pl.Trainer, previous: str, current: str) -> bool:
        return self._is_own(previous) and super()._should_remove_checkpoint(trainer, previous, current)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if gradients_pending(trainer):
            return
        # Without the outputs and the batch, which ModelCheckpoint does not read and a validation would keep alive.
        save = partial(super().on_train_batch_end, trainer, pl_module, None, None, batch_idx)
        if trainer.is_last_batch or validation_follows(trainer):
            self._waiting.append(save)
        else:
            save()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:  # before a second fit, when is_last_batch is still that of the first
            return
        self._waiting.append(partial(super().on_validation_end, trainer, pl_module))
        if not trainer.is_last_batch:
            self._save_all()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        self._save_all()

    def _save_all(self) -> None:
        while self._waiting:
            self._waiting.pop(0)()


class BestCheckpoint(ExactCheckpoint):
    """Keeps the checkpoints with the best values of a validation metric, as ``best-epoch<n>-step<n>.ckpt``: counted
    from 1, as on the screen, and the optimizer steps that were done. If values are equal, the latest
    checkpoint is kept.

    Args:
        dirpath: folder of the files
        monitor: metric that selects the best checkpoint; null: the first that the task names; if it names none, none is kept
        mode: max or min: whether a higher or a lower metric is better; null: that of the task's metric, else min
        save_top_k: number of best checkpoints to keep, in addition to last.ckpt; -1: one of each validation
        every_n_train_steps: save last.ckpt every n optimizer steps too; None: only after each epoch
    """

    def __init__(
        self,
        dirpath: Path | None = None,
        monitor: str | None = None,
        mode: Literal["max", "min"] | None = None,
        save_top_k: int = 1,
        every_n_train_steps: int | None = None,
    ) -> None:
        if save_top_k != -1:
            require_at_least(1, save_top_k=save_top_k)
        require_at_least(1, every_n_train_steps=every_n_train_steps)
        super().__init__(
            dirpath,
            filename="best-epoch{epoch}-step{step}",  # without =, which Hydra needs quoted
            auto_insert_metric_name=False,
            monitor=monitor,
            mode=mode or "min",
            save_top_k=save_top_k if monitor else 0,
        )
        self.last_every_n_steps = every_n_train_steps

    def check_monitor_top_k(self, trainer: pl.Trainer, current: Tensor | None = None) -> bool:
        if super().check_monitor_top_k(trainer, current):
            return True
        worst_kept = self.best_k_models.get(self.kth_best_model_path)
        equal = current is not None and worst_kept is not None and bool(current == worst_kept)
        return trainer.strategy.reduce_boolean_decision(equal)

    def format_checkpoint_name(self, metrics: dict[str, Tensor], *rest: Any, **options: Any) -> str:
        return super().format_checkpoint_name(metrics | {"epoch": metrics["epoch"] + 1}, *rest, **options)

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        for path, score in self.best_k_models.items():  # first to last
            if score == self.best_model_score:
                self.best_model_path = path
        super()._save_checkpoint(trainer, filepath)


def last_checkpoint(path: Path, every_n_train_steps: int | None = None) -> ExactCheckpoint:
    """Overwrites one file after every epoch, or every so many optimizer steps."""
    return ExactCheckpoint(
        path.parent,
        filename=path.stem,
        enable_version_counter=False,
        every_n_train_steps=every_n_train_steps,
        save_on_train_epoch_end=every_n_train_steps is None,
    )


class WeightAverage(EMAWeightAveraging):
    """Exponential moving average of the weights, which is validated, tested and saved in place of the weights.

    Args:
        decay: weight of the previous average in each update, in [0, 1)
        update_every_n_steps: update the average every n optimizer steps
        warmup: begin with less: after n updates (1 + n) / (10 + n), so that a short training is not mostly its first weights
    """

    def __init__(self, decay: float = 0.999, update_every_n_steps: int = 1, warmup: bool = True) -> None:
        require_within(0, 1, decay=decay)
        require_at_least(1, update_every_n_steps=update_every_n_steps)
        super().__init__(decay=decay, update_every_n_steps=update_every_n_steps)
        self.decay, self.warmup = decay, warmup

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if self._average_model is not None:  # counted on the host: torch asks the device for the number at each update
            self._average_model.n_averaged = self._average_model.n_averaged.cpu()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step > self._latest_update_step and self.should_update(step_idx=step - 1):
            self._update(pl_module)
            self._latest_update_step = step

    @torch.no_grad()
    def _update(self, pl_module: pl.LightningModule) -> None:
        """What AveragedModel does with a dozen operators a tensor, in one for all tensors of a dtype, and without a wait."""
        average = self._average_model
        assert average is not None
        count = int(average.n_averaged)
        decay = min(self.decay, (1 + count) / (10 + count)) if self.warmup else self.decay
        groups: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        for pair in _pairs(average.module, pl_module):
            groups.setdefault(pair[0].dtype, []).append(pair)
        for dtype, pairs in groups.items():
            old, new = zip(*pairs, strict=True)
            # Integers, such as weights in few bits, are copied: their average would be rounded at each update.
            if count == 0 or not dtype.is_floating_point:
                torch._foreach_copy_(old, new)
            else:
                torch._foreach_lerp_(old, new, 1 - decay)
        average.n_averaged += 1


def _pairs(average: nn.Module, current: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """The parameters and buffers of a copy and of its original, each once; not what the original has got since."""
    found = {}
    for copied, part in zip(parts_of(average), parts_of(current), strict=True):
        for old, new in ((copied._parameters, part._parameters), (copied._buffers, part._buffers)):
            for name, tensor in old.items():
                if tensor is not None and (now := new.get(name)) is not None:
                    found[id(tensor)] = tensor, now
    return [*found.values()]
