"""ExactResume: a resumed training continues as if it had not been interrupted."""

import random
from typing import Any, cast

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.loops.fit_loop import _FitLoop as FitLoop
from lightning.pytorch.loops.loop import _Loop as Loop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop as TrainingEpochLoop

from holotrain.numeric import mixed_seed

KEY = "exact_resume"


class ExactResume(pl.Callback):
    """Saves in checkpoints what Lightning leaves out, and restores it when the training is resumed.

    This is the global random states (torch on CPU and GPUs, NumPy, Python) and the training
    loader's position in the epoch, if the loader has a ``state_dict``: Lightning (2.6) stores it, but does not restore it if
    the module has used ``trainer.estimated_stepping_batches``. All are restored when training starts, before the first batch is
    fetched, because mixup draws random numbers while the batch moves to the device. They are stored in plain containers, so
    that ``torch.load(weights_only=True)`` accepts them.

    Gradients are not saved. With ``accumulate_grad_batches``, validations and requests to stop wait for the optimizer step
    (:class:`WholeSteps`), so their checkpoints need no gradients.

    With several processes, each has its own random state and draws its own dropout. If the training continues with another
    number of processes, their new states depend on the seed, the step and the rank.

    Args:
        seed: seed of the run.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._to_restore: dict[str, Any] | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        wait_for_whole_steps(trainer)

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        loader = trainer.train_dataloader
        position = loader.state_dict() if hasattr(loader, "state_dict") else None
        states = random_states() | {"loader": position}
        of_all: list[Any] = [states]
        if has_peers():
            of_all *= dist.get_world_size()
            dist.all_gather_object(of_all, states)
        checkpoint[KEY] = {"random": of_all, "shares": shard_of(trainer)[1]}

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._to_restore = checkpoint.get(KEY)
        if self._to_restore is not None:
            loops = checkpoint["loops"]["fit_loop"]
            loops["state_dict"].pop("combined_loader", None)  # the positions of loaders, which are restored below
            _reopen_epoch(loops, trained=0 <= trainer.max_steps <= checkpoint["global_step"])

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        saved, self._to_restore = self._to_restore, None
        if saved is not None:
            self._restore(saved, trainer, pl_module)
        elif trainer.world_size > 1:
            self._begin(trainer)

    def _restore(self, saved: dict[str, Any], trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        states = saved["random"]
        # Processes with the same share of the data need the same state, so the same number of processes is not enough.
        if len(states) == trainer.world_size and saved["shares"] == shard_of(trainer)[1]:
            restore_random_states(states[trainer.global_rank])
        else:
            self._begin(trainer)
        _end_epoch(trainer.fit_loop)
        position = _position([state["loader"] for state in states], trainer)
        loader = trainer.train_dataloader
        if position is not None and hasattr(loader, "load_state_dict"):
            loader.load_state_dict(position)
            _count_as(getattr(loader, "batch_sampler", None), position, trainer.fit_loop)

    def _begin(self, trainer: pl.Trainer) -> None:
        """Seeds torch differently for each share of the data; processes with the same share get the same seed."""
        torch.manual_seed(mixed_seed(self.seed, trainer.global_step, shard_of(trainer)[0]))


def _position(positions: list[dict[str, Any] | None], trainer: pl.Trainer) -> dict[str, Any] | None:
    """Of a stream, that of this process's shard, which had another rank if the strategy has changed; the loader refuses others.
    Other loaders have the same position in all processes."""
    shard = [*shard_of(trainer)]
    found = (position for position in positions if position and position.get("place", {}).get("processes") == shard)
    return next(found, positions[trainer.global_rank % len(positions)])


def _reopen_epoch(progress: dict[str, Any], trained: bool) -> None:
    """Continues an epoch that ``max_steps`` or a request to stop cut short; Lightning (2.6) would start the next one.

    Args:
        trained: no step is left; the epoch counts, as it does where it was cut short.
    """
    if not progress["epoch_loop.batch_progress"]["is_last_batch"]:
        for count in (progress["epoch_progress"]["current"], progress["epoch_progress"]["total"]):
            count["processed"] = count["completed"] = count["ready"] - (not trained)


def _end_epoch(loop: FitLoop) -> None:
    """Ends the epoch of a checkpoint that was saved after its last batch. With ``max_steps``, Lightning (2.6) would continue
    that epoch and skip the next one."""
    epoch = loop.epoch_progress
    if loop.epoch_loop.batch_progress.is_last_batch:
        Loop.restarting.fset(loop, False)
        loop.reset_restart_stage()
        missing = epoch.current.processed - epoch.current.completed  # ty: ignore[missing-attribute]
        for count in (epoch.current, epoch.total):
            count.completed += missing


def _count_as(sampler: Any, position: dict[str, Any], loop: FitLoop) -> None:
    """Has the loop count the batches of the epoch as the sampler does, whose batches may have another size than before."""
    progress, drawn = loop.epoch_loop.batch_progress, getattr(sampler, "drawn", None)
    if drawn is not None and not progress.is_last_batch:
        for name in ("ready", "started", "processed", "completed"):
            setattr(progress.current, name, getattr(progress.current, name) + drawn - position["batches"])


def has_peers() -> bool:
    """Whether this process has joined others."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def shard_of(trainer: pl.Trainer) -> tuple[int, int]:
    """Index and number of shards of the data. Processes that share a model, by layers or in stages, read the same shard."""
    sampling = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {"rank": 0, "num_replicas": 1}
    return sampling["rank"], sampling["num_replicas"]


def random_states() -> dict[str, Any]:
    """The states of all global generators, in plain containers and tensors."""
    name, keys, position, has_gauss, gauss = cast(tuple, np.random.get_state())
    version, internal, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": {"name": name, "keys": keys.tolist(), "rest": [position, has_gauss, gauss]},
        "python": {"version": version, "internal": list(internal), "gauss_next": gauss_next},
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Sets the global generators to what ``random_states`` returned; states of GPUs that do not exist are skipped."""
    torch.set_rng_state(states["torch"])
    for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, device)
    numpy, python = states["numpy"], states["python"]
    np.random.set_state((numpy["name"], np.array(numpy["keys"], dtype=np.uint32), *numpy["rest"]))
    random.setstate((python["version"], tuple(python["internal"]), python["gauss_next"]))


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
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher is not None and trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)
