"""Builds data, model, task and synthesis from a configuration."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from holotrain import data as datasets
from holotrain.callbacks import SynthesisCallback
from holotrain.config.build_optimizer import check_optimizer, make_optimizer, make_scheduler
from holotrain.config.command_options import FitConfig, PlanConfig, RunConfig
from holotrain.config.given import PYTHON_OBJECT
from holotrain.config.objects import ObjectConfig
from holotrain.config.option_groups import (
    AUTO,
    CAUSAL_LM,
    CLASSIFIER,
    HUGGING_FACE,
    MODEL_OPTIONS,
    OBJECT_GROUPS,
    ON_MISMATCH,
    SEQUENCE_CLASSIFIER,
    TASK_OPTIONS,
    TEXT,
    default_backward,
    is_a,
    takes,
)
from holotrain.config.signatures import REQUIRED
from holotrain.data import ByteTokenizer, tokenizer_from_json
from holotrain.data.decoding import MEGAPIXELS
from holotrain.data.limits import EXPANSION
from holotrain.errors import UserError, as_user_error
from holotrain.models import compile_blocks
from holotrain.models.adapters import PEFT, add_adapters, add_peft, freeze
from holotrain.models.block_schedules import schedule_blocks, set_backward, set_tile
from holotrain.models.building import allocated
from holotrain.models.checkpoint_files import read_weights
from holotrain.models.external import ExternalModel
from holotrain.models.pretrained import load_pretrained
from holotrain.reversible import checks_in
from holotrain.synthesis import HolographicSynthesis
from holotrain.targets import instantiate, is_of, needed


def build_data(config: RunConfig, tokenizer: str | None = None) -> pl.LightningDataModule:
    """The data module of a run. It reads its data in ``setup``.

    Args:
        tokenizer: the tokenizer of the checkpoint that the run starts from, from ``to_json``.
    """
    known: dict[str, Any] = {"seed": config.seed}
    if is_a(config.data, TEXT):
        packed = is_a(config.task, CAUSAL_LM)
        known |= {"layout": "packed" if packed else "documents", "tokenizer_json": tokenizer}
        known["labels"] = is_a(config.task, SEQUENCE_CLASSIFIER)
    return OBJECT_GROUPS["data"].make("data", config.data, pl.LightningDataModule, **known)


def data_properties(data: pl.LightningDataModule) -> dict[str, Any]:
    """What data, which are set up, tell models and tasks, by the names of their parameters."""
    facts: dict[str, Any] = {}
    if shape := getattr(data, "image_shape", None):
        facts |= {"channels": shape[0], "image_size": shape[1]}
    for attribute, other in (("num_classes", "classes"), ("vocab_size", "vocab"), ("context", "context")):
        if value := getattr(data, attribute, None):
            facts |= {other: value, attribute: value}
    if isinstance(data, datasets.TextDataModule):
        facts["pad_id"] = data.tokenizer.pad_id
    return facts


def with_data_properties(group: str, chosen: ObjectConfig, facts: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a model or a task, with the facts under the names of its parameters.

    Raises:
        UserError: the configuration contradicts the facts, or a value is not known.
    """
    arguments = {name: value for name, value in chosen.arguments.items() if group != "model" or name not in MODEL_OPTIONS}
    for name, value in facts.items():
        if takes(chosen, name) and arguments.setdefault(name, value) != value:
            raise UserError(f"{group}.{name}: {arguments[name]} does not fit the data, which have {value}; leave it out")
    for name, option in OBJECT_GROUPS[group].options(chosen.target).items():
        if option.default is REQUIRED and name not in arguments:
            raise UserError(f"{group}.{name}: the data do not tell it; give {group}.{name}=...")
    return arguments


def model_arguments(config: RunConfig, facts: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the model's class.

    Args:
        facts: from :func:`data_properties`.
    """
    assert config.model is not None
    if is_a(config.model, HUGGING_FACE) and (task := next((task for task in TASK_OPTIONS if is_a(config.task, task)), None)):
        facts = facts | {"head": TASK_OPTIONS[task]}
    arguments, backward = with_data_properties("model", config.model, facts), config.backward
    if takes(config.model, "backward"):
        kind = default_backward(config.model) if backward.kind in (None, AUTO) else backward.kind
        arguments |= ({} if kind is None else {"backward": kind}) | backward.engine()
    return arguments


def build_model(config: RunConfig, facts: dict[str, Any]) -> nn.Module:
    """The model, without pretrained weights and adapters.

    Args:
        facts: from :func:`data_properties`.
    """
    assert config.model is not None
    backward = config.backward
    with as_user_error("model"), allocated():
        chosen = replace(config.model, arguments=model_arguments(config, facts))
        model = OBJECT_GROUPS["model"].make("model", chosen, nn.Module)
    try:
        if backward.blocks:
            schedule_blocks(model, backward.blocks)
        elif not takes(config.model, "backward") and backward.kind not in (None, AUTO):
            if backward.exact:
                raise ValueError(f"{config.model.name} takes no option exact")
            set_backward(model, backward.kind, backward.store, backward.keep)
        if backward.tile is not None and not takes(config.model, "backward"):
            with as_user_error("backward.tile"):
                set_tile(model, backward.tile)
    except ValueError as error:
        if backward.blocks:
            raise UserError(f"backward.blocks: {error}; use backward.blocks=[] to choose them again") from error
        raise UserError(f"backward={backward.kind}: {error}") from error
    return model


def build_task(config: RunConfig, data: pl.LightningDataModule, begin: bool = False) -> pl.LightningModule:
    """The LightningModule with its model.

    Args:
        begin: load the pretrained weights of the configuration, if any; False if a checkpoint is loaded instead.
    """
    described = description(config, data)
    classes = described["facts"].get("classes", 0)
    if is_a(config.task, SEQUENCE_CLASSIFIER) and is_a(config.data, TEXT) and classes < 2:
        raise UserError(f"data.label: the texts have {classes} classes; at least 2 are needed")
    if config.model is None:
        return _reacting(task_of(None, config, described), config.backward.on_mismatch)
    model = build_model(config, described["facts"])
    prepare_weights(model, config.model, begin)
    if config.compile:
        compile_blocks(model, mode=None if config.compile is True else config.compile)
    return _reacting(task_of(model, config, described), config.backward.on_mismatch)


def _reacting(task: pl.LightningModule, on_mismatch: str) -> pl.LightningModule:
    """Has all reversible blocks stop where they are rebuilt wrongly, if that is asked for."""
    if on_mismatch != ON_MISMATCH[0]:
        for checks in checks_in(task):
            checks.on_mismatch = on_mismatch
    return task


def task_of(model: nn.Module | None, config: RunConfig, described: dict[str, Any]) -> pl.LightningModule:
    """The LightningModule for a model.

    Args:
        model: None, if the task takes none.
        described: from :func:`description`.
    """
    known: dict[str, Any] = {"model": model, "cuda_graph": config.backward.cuda_graph}
    if config.optimizer is not None:
        known["optimizer"] = partial(make_optimizer, config.optimizer, config.trainer.gradient_clip_val or None)
        if config.scheduler is not None:
            known["scheduler"] = partial(make_scheduler, config.scheduler)
    if "tokenizer" in described:
        tokenizer = tokenizer_from_json(described["tokenizer"])
        known |= {"token_bytes": torch.from_numpy(tokenizer.byte_lengths), "mask_id": tokenizer.mask_id}
    chosen = replace(config.task, arguments=with_data_properties("task", config.task, described["facts"]))
    return OBJECT_GROUPS["task"].make("task", chosen, pl.LightningModule, **known)


def check_values(config: RunConfig) -> None:
    """Builds the optimizer, and data, model and task without weights, if they are holotrain's, before any data are read.

    What only data that were read can tell, such as the size of a vocabulary, is made up.

    Raises:
        UserError: one of them refuses a value. Those of a checkpoint have been accepted before.
    """
    if isinstance(config, FitConfig | PlanConfig):  # the others need no optimizer
        check_optimizer(config)
    if config.ckpt_path is not None or getattr(config, "resume", False):
        return
    groups = [each for each in (config.data, config.model, config.task) if each is not None]
    if not all(is_of(each.target, ["holotrain"]) and each.target != PYTHON_OBJECT for each in groups):
        return
    data = build_data(config.with_batch(2**20) if config.batch_is_open else config)
    text = is_a(config.data, TEXT)
    facts = {"vocab": 2**10, "context": data.context} if isinstance(data, datasets.TextDataModule) else data_properties(data)
    if not text or is_a(config.task, SEQUENCE_CLASSIFIER):
        facts.setdefault("classes", 2)
    model = _on_meta(config, facts)
    if config.synthesis is not None:
        model.to_empty(device="cpu")  # it does not cover parameters without memory, which is only reserved here
    described = {"facts": facts} | ({"tokenizer": ByteTokenizer().to_json()} if text else {})
    task = task_of(model, config, described)
    if config.synthesis is not None:
        synthesis_of(config.synthesis, task).remove()


def _on_meta(config: RunConfig, facts: dict[str, Any]) -> nn.Module:
    """The model, without memory for its weights."""
    with torch.device("meta"):
        return build_model(config, facts)


def description(config: RunConfig, data: pl.LightningDataModule) -> dict[str, Any]:
    """What is needed to use the model without its data, in plain containers.

    The class and arguments of the model (without a model, of the task), what the data tell, the tokenizer of text, the classes
    of a classification, and the mean and deviation of the channels of images.
    """
    facts = data_properties(data)
    trained = config.task if config.model is None else config.model
    arguments = with_data_properties("task", config.task, facts) if config.model is None else model_arguments(config, facts)
    found: dict[str, Any] = {"target": trained.target, "arguments": arguments, "facts": facts}
    if isinstance(data, datasets.TextDataModule):
        found["tokenizer"] = data.tokenizer.to_json()
    if statistics := getattr(data, "statistics", None):
        found["statistics"] = [list(numbers) for numbers in statistics]
    if (classes := class_names(config, data)) is not None:
        found["class_names"] = classes
    return found


def class_names(config: RunConfig, data: pl.LightningDataModule) -> list[str] | None:
    """The names of the classes; None if the task is not a classification, or the data do not tell them."""
    names = getattr(data, "class_names", None) if is_a(config.task, CLASSIFIER) else None
    return None if names is None else list(names)


def build_files_loader(config: RunConfig, described: dict[str, Any], path: Path) -> DataLoader:
    """Batches of the user's files, prepared for the described model. Does not need the training data.

    Raises:
        UserError: ``path`` has nothing that can be read, or the checkpoint does not say how files are prepared.
    """
    loading = {"num_workers": getattr(config.data, "num_workers", 0)}
    batch_size, facts = getattr(config.data, "batch_size", None) or 32, described["facts"]
    if "tokenizer" in described:
        return datasets.text_files(
            path,
            tokenizer_from_json(described["tokenizer"]),
            facts["context"],
            packed=is_a(config.task, CAUSAL_LM),
            batch_size=batch_size,
            text=getattr(config.data, "text", "text"),
            expansion=getattr(config.data, "max_expansion", EXPANSION),
            **loading,
        )
    if "statistics" not in described or "image_size" not in facts:
        raise UserError(f"images: {config.data.name} does not tell how to prepare them; without images= the test set is used")
    loading["megapixels"] = getattr(config.data, "max_megapixels", MEGAPIXELS)
    return datasets.image_files(path, facts["channels"], facts["image_size"], described["statistics"], batch_size, **loading)


def synthesis_callback(chosen: ObjectConfig) -> SynthesisCallback:
    return OBJECT_GROUPS["synthesis"].make("synthesis", chosen, SynthesisCallback)


def synthesis_of(chosen: ObjectConfig, task: nn.Module) -> HolographicSynthesis:
    """The synthesis of a task, which need not be on its device yet.

    Raises:
        UserError: a value out of range, or a pattern that matches no parameter.
    """
    callback = synthesis_callback(chosen)
    with as_user_error("synthesis", OBJECT_GROUPS["synthesis"].options(chosen.target)):
        return callback.applied_to(task, on_device=False)


def prepare_weights(model: nn.Module, config: ObjectConfig, read: bool) -> None:
    """Loads pretrained weights, adds adapters and freezes parameters, in place. Reports which weights were used.

    Args:
        read: load the pretrained weights; False if a checkpoint is loaded instead.

    Raises:
        UserError: the weights are missing or belong to another model, or the model lacks the part to train.
    """
    if isinstance(model, ExternalModel):
        with as_user_error("model"):
            if read and (report := model.start_from(config.pretrained)):
                print(report, file=sys.stderr)
    elif read and config.pretrained:
        with as_user_error("model.pretrained"):
            print(load_pretrained(model, read_weights(config.pretrained)), file=sys.stderr)
    with as_user_error("model"):
        with allocated():
            with_adapters(model, config.adapters)
        if config.trained != "all" and not isinstance(config.adapters, dict):  # peft has frozen the others
            freeze(model, config.trained)


def with_adapters(model: nn.Module, adapters: int | dict[str, Any]) -> None:
    """Adds adapters in place.

    Args:
        adapters: the option ``model.adapters``.

    Raises:
        ValueError: the model has no place for them, or they need peft, which is not installed.
    """
    if isinstance(adapters, dict):
        needed(*PEFT)  # before `instantiate` imports it by name, which names no extra
        add_peft(model, instantiate(adapters))
    elif adapters:
        add_adapters(model, adapters)
