"""Reading a checkpoint into a run, and writing the configuration of a run into its checkpoints."""

from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import nn

from holotrain.checks import described_by
from holotrain.config import checkpointed
from holotrain.config.build import class_names
from holotrain.config.build_synthesis import check_synthesis_continues
from holotrain.config.chosen import TARGET
from holotrain.config.schema import RunConfig
from holotrain.config.schema.data import TextDataConfig
from holotrain.errors import UserError
from holotrain.models import registry, saved
from holotrain.models.adapters import add_adapters
from holotrain.models.int8 import is_quantised, quantise
from holotrain.ranks.shards import read_all


class KeepConfiguration(pl.Callback):
    """Writes the configuration of the run into its checkpoints."""

    def __init__(self, config: RunConfig, choices: dict[str, str], description: dict[str, Any]) -> None:
        self.stamp = checkpointed.stamp(config, choices, description)

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[checkpointed.KEY] = self.stamp


def check_origin(config: RunConfig, path: Path) -> None:
    """
    Raises:
        UserError: the checkpoint and the configuration are of different tasks.
    """
    kept = checkpointed.load(path)[checkpointed.KEY]["config"]
    if kept["task"]["kind"] != config.task.kind:
        raise UserError(f"task={config.task.kind}: {path} was trained with task={kept['task']['kind']}")


def chosen_before(config: RunConfig, path: Path) -> RunConfig:
    """The configuration of a resumed run. What was chosen automatically keeps the values that were chosen at the start."""
    kept = checkpointed.load(path)[checkpointed.KEY]["config"]
    if config.batch_is_open:
        config = config.with_batch(kept["data"][config.batch_option[0].removeprefix("data.")])
    if config.backward.open:
        config = replace(config, backward=replace(config.backward, blocks=list(kept["backward"]["blocks"])))
    return config


def check_classes(config: RunConfig, data: pl.LightningDataModule, path: Path) -> None:
    """
    Raises:
        UserError: the classes of the data are not those of the checkpoint.
    """
    described = checkpointed.load(path)[checkpointed.KEY]["description"]
    there, here = described.get("class_names"), class_names(config, data)
    if there != here:
        unlike = next(((a, b) for a, b in zip_longest(there or (), here or ()) if a != b), (there, here))
        raise UserError(f"data: {path} has other classes: {unlike[0]!r} there is {unlike[1]!r} in these data")


def tokenizer_for(config: RunConfig, path: Path | None) -> str | None:
    """The tokenizer of the checkpoint or of the pretrained weights that a run starts from, as text of ``to_json``. None: the
    tokenizer of the configuration.

    Raises:
        UserError: the configuration names another tokenizer than the checkpoint, or one of the files cannot be read.
    """
    if not isinstance(config.data, TextDataConfig):
        return None
    if path is not None:
        kept = checkpointed.load(path)[checkpointed.KEY]
        asked, there = config.data.tokenizer, kept["config"]["data"]["tokenizer"]
        if asked != there:
            raise UserError(f"data.tokenizer={asked}: {path} was trained with {there or 'byte'}; leave the option out")
        return kept["description"]["tokenizer"]
    if config.data.tokenizer is not None or not config.model.pretrained:
        return None
    begun_with = Path(config.model.pretrained)
    if (begun_with / "tokenizer.json").is_file():
        return (begun_with / "tokenizer.json").read_text(encoding="utf-8")
    try:
        return checkpointed.load(begun_with)[checkpointed.KEY]["description"].get("tokenizer")
    except UserError:  # weights of other programs have no tokenizer
        return None


def described_model(path: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a checkpoint or of an exported folder, with its weights, and its description. No data are needed.

    Raises:
        UserError: it cannot be read.
    """
    checkpoint = checkpointed.load(path)
    kept = checkpoint[checkpointed.KEY]
    described = kept["description"]
    if checkpointed.is_exported(path):
        with described_by("ckpt_path"):
            return saved.load(path), described
    try:
        model = registry.build(described["kind"], described["arguments"])
        if width := kept["config"]["model"].get("adapters"):
            add_adapters(model, width)
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise UserError(f"ckpt_path: {path} describes no model that can be built: {str(error).splitlines()[0]}") from error
    prefix = "model."
    weights = {name.removeprefix(prefix): w for name, w in checkpoint["state_dict"].items() if name.startswith(prefix)}
    check_weights(model, weights, path)
    model.load_state_dict(read_all(weights))
    return model, described


def in_int8(model: nn.Module, wanted: bool) -> None:
    """Quantises the model in place if ``wanted``, the option ``int8`` of the command.

    Raises:
        UserError: torchao is not installed, or the model is already int8.
    """
    if wanted:
        with described_by("int8"):
            quantise(model)


def load_weights(task: pl.LightningModule, path: Path) -> None:
    """Loads the weights of a checkpoint (their average, if the run kept one) or of an exported folder into the task.

    Raises:
        UserError: the checkpoint cannot be read, or holds another model.
    """
    if checkpointed.is_exported(path):
        with described_by("ckpt_path"):
            model = saved.load(path)
            if is_quantised(model):
                quantise(task.model)
        check_weights(task.model, model.state_dict(), path)
        task.model.load_state_dict(model.state_dict())
        return
    weights = checkpointed.load(path)["state_dict"]
    check_weights(task, weights, path)
    task.load_state_dict(read_all(weights))


def check_continuable(task: pl.LightningModule, config: RunConfig, path: Path) -> None:
    """
    Raises:
        UserError: training cannot continue from the checkpoint: it cannot be read, or holds another model or optimizer.
    """
    if checkpointed.is_exported(path):
        raise UserError(f"ckpt_path: {path} holds only weights; start from them with model.pretrained={path}")
    checkpoint = checkpointed.load(path)
    model = checkpoint[checkpointed.KEY]["config"]["model"]
    for option in [name for name in ("trained", "adapters") if name in model and hasattr(config.model, name)]:
        kept, wanted = model[option], getattr(config.model, option)
        if kept != wanted:
            raise UserError(
                f"model.{option}={wanted}: {path} was trained with {kept}; start a new training with model.pretrained={path}"
            )
    check_weights(task, checkpoint["state_dict"], path)
    for group in ("optimizer", "scheduler"):
        kept, wanted = checkpoint[checkpointed.KEY]["config"][group][TARGET], getattr(config, group).target
        if kept != wanted:
            raise UserError(f"{group}: {path} was trained with {kept} and can only continue with it, not with {wanted}")
    kept = checkpoint[checkpointed.KEY]["config"].get("synthesis", {"kind": "none"})["kind"]
    if kept != config.synthesis.kind:
        raise UserError(
            f"synthesis={config.synthesis.kind}: {path} was trained with synthesis={kept} and can only continue with it"
        )
    if kept != "none":
        check_synthesis_continues(config.synthesis, task, checkpoint["callbacks"])
    if checkpoint["epoch"] > (config.trainer.max_epochs or -1) > 0:
        raise UserError(f"trainer.max_epochs={config.trainer.max_epochs}: {path} is already at epoch {checkpoint['epoch']}")
    if "optimizer_states" not in checkpoint:
        raise UserError(f"ckpt_path: {path} holds only weights; training cannot continue from it")


def check_weights(module: nn.Module, weights: dict[str, Any], path: Path) -> None:
    """
    Raises:
        UserError: the names or shapes of the weights do not match. The message names the first that differs.
    """
    expected = module.state_dict()
    for name in [*expected, *weights]:
        here, there = (tuple(s[name].shape) if name in s else "none" for s in (expected, weights))
        if here != there:
            raise UserError(f"ckpt_path: {path} holds another model: {name} is {there} there and {here} in this one")
