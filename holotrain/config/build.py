"""Builds data, model and task from a configuration."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from holotrain import data as datasets
from holotrain import tasks
from holotrain.checks import described_by
from holotrain.config.build_optimization import optimizer_of, scheduler_of
from holotrain.config.build_weights import prepare_weights
from holotrain.config.schema import RunConfig
from holotrain.config.schema.backward import BackwardConfig
from holotrain.config.schema.data import TextDataConfig
from holotrain.config.schema.model import BEYOND, TransformerConfig
from holotrain.config.schema.task import tells_classes
from holotrain.data import tokenizer_from_json
from holotrain.errors import UserError
from holotrain.models import compile_blocks, registry
from holotrain.models.schedules import schedule_blocks

DATA = {
    "digits": datasets.Digits,
    "mnist": datasets.MNIST,
    "cifar10": datasets.CIFAR10,
    "cifar100": datasets.CIFAR100,
    "imagefolder": datasets.ImageFolder,
    "fake": datasets.Fake,
    "text_stdlib": datasets.StdlibText,
    "text_files": datasets.TextFiles,
}


def build_data(config: RunConfig, tokenizer: str | None = None) -> pl.LightningDataModule:
    """The data module of a run. It reads its data in ``setup``.

    Args:
        tokenizer: the tokenizer of the checkpoint that the run starts from, from ``to_json``.
    """
    _require_a_batch(config)
    arguments = _arguments(config.data)
    if isinstance(config.data, TextDataConfig):
        arguments |= _of_text(config, tokenizer)
    with described_by("data"):
        return DATA[config.data.kind](**arguments, seed=config.seed)


def _require_a_batch(config: RunConfig) -> None:
    if config.batch_is_open:
        raise UserError(f"{config.batch_option[0]}=auto: only fit and plan support auto; give a number")


def _of_text(config: RunConfig, tokenizer: str | None) -> dict[str, Any]:
    """The arguments of a text data module that depend on the task."""
    task = config.task.kind
    arguments: dict[str, Any] = {
        "layout": "packed" if task == "causal_lm" else "documents",
        "unit": config.data.unit or _unit(task, config.data.kind),
        "tokenizer": config.data.tokenizer or "byte",
        "tokenizer_json": tokenizer,
    }
    if task == "causal_lm":
        arguments["max_tokens"] = None  # packed blocks have one length
    if task != "sequence_classification":  # do not read labels that are not used
        arguments |= {"label": None} if hasattr(config.data, "label") else {"classes": 0}
    return arguments


def _unit(task: str, data: str) -> str:
    """A labeled file or row is one document, but the standard library has too few files for that."""
    return "paragraph" if task == "masked_lm" or (task, data) == ("sequence_classification", "text_stdlib") else "file"


def model_arguments(config: RunConfig, data: pl.LightningDataModule, backward: BackwardConfig | None = None) -> dict[str, Any]:
    """The arguments of the model's constructor, from its configuration and the shapes of ``data``, which is set up.

    Args:
        backward: replaces that of the configuration.
    """
    backward = backward or config.backward
    arguments = {name: value for name, value in vars(config.model).items() if name not in BEYOND}
    if isinstance(config.model, TransformerConfig):
        arguments |= {"backward": backward.schedule(config.model.kind), **backward.engine()}
    if isinstance(data, datasets.TextDataModule):
        arguments |= {"vocab": data.vocab_size, "context": data.context}
        if config.task.kind == "sequence_classification":
            if data.num_classes < 2:
                raise UserError(f"data.label: the texts have {data.num_classes} classes; at least 2 are needed")
            arguments["classes"] = data.num_classes
        return arguments
    channels, size, _ = data.image_shape
    if "patch_size" in arguments:
        arguments["patch_size"] = arguments["patch_size"] or default_patch_size(config.model.kind, size)
    return arguments | {"image_size": size, "channels": channels, "classes": data.num_classes}


def default_patch_size(kind: str, image_size: int) -> int:
    """The published size for large images; less for small images, so that they have tens of tokens."""
    if kind.endswith("swin"):
        return 4 if image_size >= 64 else 2
    return 16 if image_size >= 112 else 4 if image_size >= 24 else 2


def build_model(config: RunConfig, data: pl.LightningDataModule) -> nn.Module:
    """The model for ``data``, which is set up, without pretrained weights and adapters."""
    try:
        with described_by("model"):
            model = registry.build(config.model.kind, model_arguments(config, data))
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        refused = str(error).strip().splitlines()[-1]
        raise UserError(f"model: its weights do not fit into memory; holotrain plan shows their size ({refused})") from error
    if config.backward.blocks:
        try:
            schedule_blocks(model, config.backward.blocks)
        except ValueError as error:
            raise UserError(f"backward.blocks: {error}; use backward.blocks=[] to choose them again") from error
    return model


def build_task(config: RunConfig, data: pl.LightningDataModule, begin: bool = False) -> tasks.Task:
    """The LightningModule with its model.

    Args:
        begin: load the pretrained weights of the configuration, if any; False if a checkpoint is loaded instead.
    """
    model = build_model(config, data)
    if isinstance(config.model, TransformerConfig):
        prepare_weights(model, config.model, begin)
    if config.compile:
        compile_blocks(model)
    return task_of(model, config, description(config, data))


def task_of(model: nn.Module, config: RunConfig, described: dict[str, Any]) -> tasks.Task:
    """The LightningModule for a model.

    Args:
        described: from :func:`description`.
    """
    optimizer = optimizer_of(config.optimizer)
    options = {
        "optimizer": optimizer,
        "scheduler": scheduler_of(config.scheduler, optimizer),
        "cuda_graph": config.backward.cuda_graph,
    }
    return TASKS[config.task.kind](model, config, described, options)


def description(config: RunConfig, data: pl.LightningDataModule) -> dict[str, Any]:
    """What is needed to use the model without its data, in plain containers.

    The model's kind and arguments, its tokenizer (text), its classes, and the mean and deviation of its images' channels.
    """
    found: dict[str, Any] = {"kind": config.model.kind, "arguments": model_arguments(config, data)}
    if isinstance(data, datasets.TextDataModule):
        found["tokenizer"] = data.tokenizer.to_json()
    else:
        found["statistics"] = [list(numbers) for numbers in data.statistics]
    if (classes := class_names(config, data)) is not None:
        found["class_names"] = classes
    return found


def class_names(config: RunConfig, data: pl.LightningDataModule) -> list[str] | None:
    """The names of the classes; None if the task is not a classification."""
    return list(data.class_names) if tells_classes(config.task.kind) else None


def build_files_loader(config: RunConfig, described: dict[str, Any], path: Path) -> DataLoader:
    """Batches of the user's files, prepared for the described model. Does not need the training data.

    Raises:
        UserError: ``path`` has nothing that can be read.
    """
    _require_a_batch(config)
    loading = {"num_workers": config.data.num_workers}
    arguments = described["arguments"]
    if "tokenizer" not in described:
        shape = (arguments["channels"], arguments["image_size"])
        return datasets.image_files(path, *shape, described["statistics"], config.data.batch_size, **loading)
    return datasets.text_files(
        path,
        tokenizer_from_json(described["tokenizer"]),
        arguments["context"],
        packed=config.task.kind == "causal_lm",
        batch_size=config.data.batch_size,
        text=getattr(config.data, "text", "text"),
        **loading,
    )


def _classifier(make: type[tasks.Task], model: nn.Module, config: RunConfig, described: dict, options: dict) -> tasks.Task:
    classes = len(described["class_names"])
    return make(model, classes=classes, label_smoothing=config.task.label_smoothing, **options)


def _error_diffusion(model: nn.Module, config: RunConfig, described: dict, options: dict) -> tasks.Task:
    options = options | {"clamp_signs": config.task.clamp_signs}
    return _classifier(tasks.ErrorDiffusionClassifier, model, config, described, options)


def _causal_lm(model: nn.Module, config: RunConfig, described: dict, options: dict) -> tasks.Task:
    tokenizer = tokenizer_from_json(described["tokenizer"])
    return tasks.CausalLM(model, token_bytes=torch.from_numpy(tokenizer.byte_lengths), **options)


def _masked_lm(model: nn.Module, config: RunConfig, described: dict, options: dict) -> tasks.Task:
    tokenizer = tokenizer_from_json(described["tokenizer"])
    words = torch.from_numpy(tokenizer.byte_lengths) > 0
    return tasks.MaskedLM(model, tokenizer.mask_id, words, config.task.mask_probability, **options)


TASKS = {
    "image_classification": partial(_classifier, tasks.ImageClassifier),
    "sequence_classification": partial(_classifier, tasks.SequenceClassifier),
    "error_diffusion": _error_diffusion,
    "causal_lm": _causal_lm,
    "masked_lm": _masked_lm,
}


def _arguments(config: object) -> dict[str, Any]:
    return {name: value for name, value in vars(config).items() if name != "kind"}
