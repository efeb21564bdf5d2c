"""Reading a checkpoint into a run, and writing the configuration of a run into its checkpoints."""

from collections.abc import Collection
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import nn

from holotrain.config import checkpointed
from holotrain.config.build import class_names, synthesis_of, with_adapters
from holotrain.config.command_options import Config, FitConfig, RunConfig
from holotrain.config.objects import PYTHON_OBJECT
from holotrain.config.option_groups import HUGGING_FACE, TEXT, is_a, takes
from holotrain.data.tokenizers import tokenizer_text
from holotrain.errors import UserError, as_user_error
from holotrain.models import building, saved
from holotrain.models.building import limited
from holotrain.models.checkpoint_files import warn_of_non_finite
from holotrain.models.huggingface_files import tokenizer_of
from holotrain.models.int8 import is_quantised, quantise
from holotrain.models.plain_tensors import require_same
from holotrain.numeric import counted
from holotrain.targets import TARGET, first_line, targets
from holotrain.tasks.task import model_of


class KeepConfiguration(pl.Callback):
    """Writes the configuration of the run into its checkpoints."""

    def __init__(self, config: RunConfig, choices: dict[str, str], description: dict[str, Any]) -> None:
        self.run_metadata = checkpointed.run_metadata(config, choices, description)

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[checkpointed.KEY] = self.run_metadata


def check_origin(config: RunConfig, path: Path) -> None:
    """Raises a UserError if the checkpoint and the configuration are of different tasks."""
    kept = checkpointed.load(path)[checkpointed.KEY]["config"]
    if kept["task"][TARGET] != config.task.target:
        raise UserError(f"task: {path} was trained with {kept['task'][TARGET]}, not with {config.task.target}")


def chosen_before(config: Config, path: Path) -> Config:
    """The configuration of a resumed run. What was chosen automatically keeps the values that were chosen at the start."""
    kept = checkpointed.load(path)[checkpointed.KEY]["config"]
    if config.batch_is_open:
        config = config.with_batch(kept["data"][config.batch_option[0].removeprefix("data.")])
    if config.backward.open:
        blocks, model = list(kept["backward"]["blocks"]), kept["model"] or {}
        if blocks:  # chosen together with these
            backward = replace(config.backward, blocks=blocks, tile=kept["backward"].get("tile"))
            config = replace(config, backward=backward)
            if takes(config.model, "reversible") and model.get(TARGET) == config.model.target:
                config = replace(config, model=config.model.with_arguments(reversible=model.get("reversible")))
    return config


def check_classes(config: RunConfig, data: pl.LightningDataModule, path: Path) -> None:
    """Raises a UserError if the classes of the data are not those of the checkpoint."""
    described = checkpointed.load(path)[checkpointed.KEY]["description"]
    there, here = described.get("class_names"), class_names(config, data)
    if there != here:
        unlike = next(((a, b) for a, b in zip_longest(there or (), here or ()) if a != b), (there, here))
        one, other = ("no more" if name is None else repr(name) for name in unlike)
        raise UserError(f"data: {path} was trained on other classes: {one} there, {other} in these data")


def tokenizer_for(config: RunConfig, path: Path | None) -> str | None:
    """The tokenizer of the checkpoint or of the pretrained weights that a run starts from, as text of ``to_json``. None: the
    tokenizer of the configuration.

    Raises:
        UserError: the configuration names another tokenizer than the checkpoint, or one of the files cannot be read.
    """
    if not is_a(config.data, TEXT) or config.data.target == PYTHON_OBJECT:
        return None
    if path is not None:
        kept = checkpointed.load(path)[checkpointed.KEY]
        asked, there = config.data.tokenizer, kept["config"]["data"]["tokenizer"]
        if asked != there:
            raise UserError(f"data.tokenizer={asked}: {path} was trained with {there or 'byte'}; leave the option out")
        return kept["description"]["tokenizer"]
    if config.data.tokenizer is not None:
        return None
    if is_a(config.model, HUGGING_FACE):
        with as_user_error("model.name"):
            return tokenizer_of(config.model.arguments["name"], config.model.download)
    pretrained = getattr(config.model, "pretrained", None)
    if not pretrained:
        return None
    begun_with = Path(pretrained)
    if (begun_with / "tokenizer.json").is_file():
        return tokenizer_text(begun_with / "tokenizer.json")
    try:
        return checkpointed.load(begun_with)[checkpointed.KEY]["description"].get("tokenizer")
    except UserError:  # weights of other programs have no tokenizer
        return None


def described_model(
    path: Path, trust: Collection[str] | None = None, model: nn.Module | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a checkpoint or of an exported folder, with its weights, and its description. No data are needed.

    Args:
        trust: packages whose own classes may be called, in addition to holotrain's models; None: what the file names may be,
            because :func:`~holotrain.config.start.start_checkpoint` has checked it.
        model: takes the weights of a checkpoint; None: a new one of the class that the checkpoint names.

    Raises:
        UserError: it cannot be read, or names a class that is not trusted.
    """
    checkpoint = checkpointed.load(path)
    kept = checkpoint[checkpointed.KEY]
    described = kept["description"]
    vouched = checked_names(described) if trust is None else ()
    if checkpointed.is_exported(path):
        with as_user_error("ckpt_path"):
            return saved.load(path, trust or (), vouched), described
    if model is None:
        model = _built(kept, path, trust or (), vouched, checkpoint["state_dict"])
    prefix = "" if kept["config"]["model"] is None else "model."
    weights = {name.removeprefix(prefix): w for name, w in checkpointed.weights(path).items() if name.startswith(prefix)}
    check_weights(model, weights, path)
    warn_of_non_finite(weights, path)
    model.load_state_dict(weights)
    return model, described


def _built(
    kept: dict[str, Any], path: Path, trust: Collection[str], vouched: Collection[tuple[str, str]], weights: dict[str, Any]
) -> nn.Module:
    described = kept["description"]
    if described["target"] == PYTHON_OBJECT:
        raise UserError(
            f"ckpt_path: {path} holds the weights of a {described['arguments'].get('kind')} that Python code made; give one to "
            "holotrain.load(..., model=...)"
        )
    try:
        model = building.build(described["target"], described["arguments"], trust, vouched, weights)
        with limited():
            with_adapters(model, (kept["config"]["model"] or {}).get("adapters", 0))
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise UserError(f"ckpt_path: {path} describes no model that can be built: {first_line(error)}") from error
    return model


def checked_names(described: dict[str, Any]) -> set[tuple[str, str]]:
    """The classes that a description names, with their places: those of the configuration, which are trusted."""
    return {*targets({TARGET: described["target"], **described["arguments"]})}


def in_int8(model: nn.Module, wanted: bool) -> None:
    """Quantises the model in place if ``wanted``, the option ``int8`` of the command.

    Raises:
        UserError: torchao is not installed, or the model is already int8.
    """
    if wanted:
        with as_user_error("int8"):
            quantise(model)


def load_weights(task: pl.LightningModule, path: Path) -> None:
    """Loads the weights of a checkpoint (their average, if the run kept one) or of an exported folder into the task.

    Raises:
        UserError: the checkpoint cannot be read, or holds another model.
    """
    if checkpointed.is_exported(path):
        with as_user_error("ckpt_path"):
            model = saved.load(path, vouched=checked_names(checkpointed.load(path)[checkpointed.KEY]["description"]))
            if is_quantised(model):
                quantise(model_of(task))
        check_weights(model_of(task), model.state_dict(), path)
        model_of(task).load_state_dict(model.state_dict())
        return
    weights = checkpointed.weights(path)
    check_weights(task, weights, path)
    warn_of_non_finite(weights, path)
    task.load_state_dict(weights)


def check_continuable(task: pl.LightningModule, config: FitConfig, path: Path, processes: int = 1) -> None:
    """Raises a UserError if training cannot continue from the checkpoint, such as that of another model or optimizer.

    Args:
        processes: their number, if FSDP2 shards the model.
    """
    if checkpointed.is_exported(path):
        raise UserError(f"ckpt_path: {path} holds only weights; start from them with model.pretrained={path}")
    checkpoint = checkpointed.load(path)
    if missing := sorted(checkpointed.STATE.keys() - checkpoint.keys()):
        raise UserError(f"ckpt_path: {path} has no {', '.join(missing)}; training cannot continue from it")
    model = checkpoint[checkpointed.KEY]["config"]["model"]
    for option in ("trained", "adapters") if model and config.model else ():
        kept, wanted = model[option], getattr(config.model, option)
        if kept != wanted:
            raise UserError(
                f"model.{option}={wanted}: {path} was trained with {kept}; start a new training with model.pretrained={path}"
            )
    for part in checkpointed.WEIGHTS:
        if part in checkpoint:
            check_weights(task, checkpoint[part], path)
    for group in ("optimizer", "scheduler"):
        kept, wanted = checkpoint[checkpointed.KEY]["config"][group], getattr(config, group)
        kept, wanted = kept and kept[TARGET], wanted and wanted.target
        if kept != wanted:
            raise UserError(f"{group}: {path} was trained with {kept} and can only continue with it, not with {wanted}")
    kept = checkpoint[checkpointed.KEY]["config"]["synthesis"] or {}
    kept, wanted = kept.get("mode", "none"), getattr(config.synthesis, "mode", "none")
    if kept != wanted:
        raise UserError(f"synthesis={wanted}: {path} was trained with synthesis={kept} and can only continue with it")
    if config.synthesis is not None:
        synthesis = synthesis_of(config.synthesis, task)
        with as_user_error("synthesis"):
            for name, state in checkpoint["callbacks"].items():
                if name.startswith(config.synthesis.name):
                    synthesis.load_state_dict(state) if processes == 1 else synthesis.check_state(state, processes)
        synthesis.remove()
    try:
        loops, most = checkpoint["loops"]["fit_loop"], config.trainer.max_epochs or -1
        done = loops["epoch_progress"]["current"]["processed"]  # counts an epoch that max_steps has cut short
        whole = loops["epoch_loop.batch_progress"]["is_last_batch"]
        trained = done > most > 0 or (done == most and whole and not config.resume)
    except (KeyError, TypeError) as error:
        raise UserError(f"ckpt_path: {path} does not say how far its training is; it cannot continue from it") from error
    if trained:
        raise UserError(f"trainer.max_epochs={most}: {path} has trained {counted(done, 'epoch')}; to train on, give more")


def check_weights(module: nn.Module, weights: dict[str, Any], path: Path) -> None:
    """Raises a UserError that names the first of the weights whose name, shape or kind of numbers does not match."""
    try:
        require_same(module.state_dict(), weights)
    except ValueError as error:
        raise UserError(f"ckpt_path: {path} holds another model: {error}") from error
