"""Checkpoints on their way in and out of a run."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from holotrain.config import checkpointed
from holotrain.config.build_synthesis import check_synthesis_continues
from holotrain.config.schema import RunConfig
from holotrain.errors import UserError


class KeepConfiguration(pl.Callback):
    """Lets the run's configuration travel inside its checkpoints."""

    def __init__(self, config: RunConfig, choices: dict[str, str]) -> None:
        self.stamp = checkpointed.stamp(config, choices)

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[checkpointed.KEY] = self.stamp


def load_weights(task: pl.LightningModule, path: Path) -> None:
    """Gives the task a checkpoint's weights (their average, where the run kept one).

    Raises:
        UserError: the checkpoint cannot be read, or is of another model.
    """
    weights = checkpointed.load(path)["state_dict"]
    check_weights(task, weights, path)
    task.load_state_dict(weights)


def check_continuable(task: pl.LightningModule, config: RunConfig, path: Path) -> None:
    """
    Raises:
        UserError: the checkpoint cannot be read, or is of another model or optimizer, so that training cannot continue.
    """
    checkpoint = checkpointed.load(path)
    check_weights(task, checkpoint["state_dict"], path)
    for group in ("optimizer", "scheduler"):
        kept, wanted = checkpoint[checkpointed.KEY]["config"][group]["kind"], getattr(config, group).kind
        if kept != wanted:
            raise UserError(f"{group}={wanted}: {path} was trained with {group}={kept}, and continues with its state alone")
    kept = checkpoint[checkpointed.KEY]["config"].get("synthesis", {"kind": "none"})["kind"]
    if kept != config.synthesis.kind:
        raise UserError(f"synthesis={config.synthesis.kind}: {path} was trained with synthesis={kept}, and continues with that")
    if kept != "none":
        check_synthesis_continues(config.synthesis, task, checkpoint["callbacks"])
    if checkpoint["epoch"] > config.trainer.max_epochs > 0:
        raise UserError(f"trainer.max_epochs={config.trainer.max_epochs}: {path} is of epoch {checkpoint['epoch']} already")
    if "optimizer_states" not in checkpoint:
        raise UserError(f"ckpt_path: {path} holds weights alone; a training cannot continue from it")


def check_weights(task: pl.LightningModule, weights: dict, path: Path) -> None:
    """
    Raises:
        UserError: the weights are not those of the task's model; names the first that differs.
    """
    expected = task.state_dict()
    for name in [*expected, *weights]:
        here, there = (tuple(s[name].shape) if name in s else "none" for s in (expected, weights))
        if here != there:
            raise UserError(f"ckpt_path: {path} is of another model: {name} is {there} there and {here} in this one")
