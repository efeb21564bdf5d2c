"""What a trainer takes over from a checkpoint by name, checked before it does: counts of its loops, states of callbacks."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from holotrain.checkpoints.exact_resume import KEY
from holotrain.config import checkpointed
from holotrain.errors import UserError
from holotrain.optimizers.restored import MOST_COUNTED, require_like
from holotrain.targets import is_of

STEPS = ("epoch_loop.automatic_optimization.optim_progress", "epoch_loop.manual_optimization.optim_step_progress")
"""Where the loops count the optimizer's steps; one of the two ways is used."""

SCORE = torch.tensor(0.0)
"""What the value of a metric is like."""


def check_taken_over(trainer: pl.Trainer, path: Path) -> None:
    """Raises a UserError if a count is not one, or if a callback of holotrain's or Lightning's finds other kinds of values."""
    checkpoint = checkpointed.load(path)
    try:
        _check_loops(checkpoint["loops"]["fit_loop"], trainer.fit_loop.state_dict(), checkpoint["global_step"])
        for position in _positions(checkpoint):
            _check_position(position)
        for callback in trainer.callbacks:  # ty: ignore[missing-attribute]
            if callback.state_key in checkpoint["callbacks"] and is_of(type(callback).__module__, ["holotrain", "lightning"]):
                _check_callback(callback, checkpoint["callbacks"][callback.state_key])
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # the first and the third of what is no mapping
        said = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise UserError(f"ckpt_path: {path} is damaged, or of another training: {said}") from error


def _check_loops(kept: dict[str, Any], fresh: dict[str, Any], steps: int) -> None:
    for name in fresh.keys() & kept.keys():
        if fresh[name]:  # those of loaders are empty
            _check_counts(name, kept[name], fresh[name])
    automatic, manual = (kept[name] for name in STEPS)
    counted = {automatic["optimizer"]["step"]["total"]["completed"], manual["total"]["completed"]}
    if steps not in counted:
        raise ValueError(f"global_step is {steps}, and its loops count {' or '.join(map(str, sorted(counted)))}")


def _check_counts(what: str, kept: Any, fresh: Any) -> None:
    if isinstance(fresh, dict) and isinstance(kept, dict) and kept.keys() <= fresh.keys():
        for name, value in kept.items():
            _check_counts(f"{what}.{name}", value, fresh[name])
    elif type(kept) is not type(fresh) or isinstance(kept, dict) or not 0 <= kept <= MOST_COUNTED:
        raise ValueError(f"{what} is {kept!r:.60}, which is not a count")


def _positions(checkpoint: dict[str, Any]) -> list[Any]:
    """Those of loaders: Lightning's, and ours of each process."""
    of_processes = checkpoint[KEY]["random"] if KEY in checkpoint else []
    positions = checkpoint["loops"]["fit_loop"].get("state_dict", {}).get("combined_loader", [])
    return [*positions, *(each["loader"] for each in of_processes if each["loader"] is not None)]


def _check_position(position: dict[str, Any]) -> None:
    for name in ("epoch", "batches"):  # of ours; those of others have other names
        _check_counts(f"the position's {name}", position.get(name, 0), 0)


def _check_callback(callback: pl.Callback, kept: Any) -> None:
    name = type(callback).__name__
    require_like(name, kept, callback.state_dict())
    if isinstance(callback, ModelCheckpoint):
        scores = [kept[score] for score in ("best_model_score", "current_score") if kept[score] is not None]
        for score in (*scores, *kept["best_k_models"].values()):
            require_like(f"a score of {name}", score, SCORE)
