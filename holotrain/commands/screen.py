"""What the commands print and log: the first and the last screen, and no warnings that do not matter."""

import logging
import os
import shlex
import sys
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from holotrain.callbacks.shown import FIGURES
from holotrain.commands.run import SUMMARY, Run, Summary
from holotrain.config.build import device_name, model_parallel_size, why_no_graphs
from holotrain.config.checkpointed import changes
from holotrain.config.command_options import RunConfig
from holotrain.config.option_groups import ObjectConfig, loads_weights
from holotrain.data.images import ImageDataModule
from holotrain.data.loader import left_out
from holotrain.data.text.module import TextDataModule
from holotrain.errors import printable, readable
from holotrain.models.quantised import parameter_count, quantised_counts
from holotrain.numeric import counted, in_words
from holotrain.reversible.graphs import StepGraphs
from holotrain.schedules import AUTO, COMPILED, kind_of


class _Readable(Console):
    """A console that lets no text control the terminal: not one that is printed, nor one in a table."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(readable(text), **options)


plain = partial(_Readable, highlight=False, markup=False, emoji=False, force_jupyter=False)
"""A console that prints names of files and of options as they are, also those with ``[red]`` or ``:star:`` in them; to the
standard output also in a notebook."""

# Paths must not be wrapped when the output goes to a file.
console = plain(width=None if (sys.stdout and sys.stdout.isatty()) or "COLUMNS" in os.environ else 160)

log = logging.getLogger("holotrain")
"""What it gets stands in the folder of a run of the command line, in ``log.txt``."""

REMARKS = (
    ".*does not have many workers.*",  # small data sets in memory need none
    ".*smaller than the logging interval.*",
    ".*exists and is not empty.*",  # a resumed run uses its folder again
    ".*dirpath has changed.*",  # a continued run has a new folder
    ".*LeafSpec.*",  # Lightning uses a deprecated part of torch
    ".*Found .* module.* in eval mode.*",
    ".*accumulate the metric across devices.*",  # sums over tokens are reduced before the division
    ".*overrides the configure_model callback.*",  # it shards nothing when weights are averaged
    ".*custom batch sampler.*",  # ours keep the order where it matters
    r".*torch\.distributed\.\w+_tensor` is deprecated.*",  # torch's own FSDP2 and tensor parallelism call them
)

LEVELS = {
    "lightning.pytorch": logging.WARNING,
    "lightning.fabric": logging.WARNING,
    "torch.utils._pytree": logging.ERROR,  # torchao uses a deprecated part of torch
    "torch.distributed.tensor._redistribute": logging.ERROR,
    "hydra_plugins.hydra_optuna_sweeper": logging.CRITICAL,  # a failed job has said why it failed
    "optuna.storages": logging.WARNING,  # it would print the random name of its study
}


def quieten() -> None:
    """Silences these warnings in this process, and shows others without a line of source."""
    warnings.formatwarning = lambda message, *_: f"warning: {printable(str(message))}\n"  # ty: ignore[invalid-assignment]
    for name, level in LEVELS.items():
        logging.getLogger(name).setLevel(level)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's messages about missing GPUs and its own stages
    for remark in REMARKS:
        warnings.filterwarnings("ignore", message=remark)


@contextmanager
def quietly() -> Generator[None]:
    """Silences these warnings inside, and leaves those of the program around as they were."""
    levels, formatted = {name: logging.getLogger(name).level for name in LEVELS}, warnings.formatwarning
    with warnings.catch_warnings():
        quieten()
        try:
            yield
        finally:
            warnings.formatwarning = formatted
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


def show(title: str, rows: Mapping[str, object], stderr: bool = False) -> None:
    """Prints the entries that have a value as a table, and logs them."""
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    lines = [title]
    for name, value in rows.items():
        if value is not None:
            table.add_row(name, short(name, value))
            lines.append(f"{name}: {short(name, value)}")
    (plain(stderr=True) if stderr else console).print(table)
    log.info("\n  ".join(lines))


def short(name: str, value: object) -> str:
    """A value for the eye: four digits of a number, bytes with their unit; of a text nothing that controls a terminal. A list
    in lines."""
    if name.endswith("_bytes") and isinstance(value, int):
        return in_words(value)
    if isinstance(value, list):
        return "\n".join(map(printable, value))
    return f"{value:{FIGURES}}" if isinstance(value, float) else printable(str(value))


def runs_of(blocks: Sequence[str]) -> str:
    """The schedules of blocks as text, such as ``"4 checkpoint, 2 autograd"``."""
    return ", ".join(f"{len(list(run))} {name}" for name, run in groupby(blocks))


PARTS = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}
"""The parts of the data that a command reads while this screen is shown."""

AUGMENTATION = (
    "randaugment",
    "randaugment_ops",
    "color_jitter",
    "random_erasing",
    "repeated_augmentation",
    "mixup_alpha",
    "cutmix_alpha",
)
"""Options of images that change what is trained on."""

NEUTRAL = {"layer_decay": 1, "repeated_augmentation": 1}
"""Values of options that change nothing; those of others are 0."""

NAMED = 10
"""So many classes are named."""

RESULTS = ("steps", "epochs", "early_stopping_patience", "max_time", "samples_per_second", "tokens_per_second", "step_seconds")
RESULTS += ("step_peak_bytes", "planned_step_bytes", "seconds", "checkpoint")
"""Fields of summary.json on the last screen, after the metrics."""


def show_start(
    config: RunConfig, run: Run, model: nn.Module, origin: Path | None, data: pl.LightningDataModule | None = None
) -> None:
    """Prints the settings of the run and the sizes of model and data. ``origin``: the checkpoint that it starts from."""
    log.info("holotrain %s", shlex.join([run.command, *run.overrides]))
    fits, sizes = run.command == "fit", _sizes(data, run.command)
    rows: dict[str, object] = {"name": config.name, "tags": ", ".join(config.tags) or None, "model": _model(config, run, model)}
    rows["task"] = _named(run, "task", config.task)
    rows["data"] = ", ".join([_named(run, "data", config.data), *_images(data), _batches(config, run)])
    if isinstance(data, TextDataModule):
        parts = ", ".join(f"{_large(counts['tokens'])} to {name}" for name, counts in data.counts.items())
        rows["text"] = f"tokens: {parts}; vocabulary {data.vocab_size}, context {data.context}"
        rows["chats"] = data.chats or None
        rows["classes"] = _classes(data)
    unused = ""
    if fits and sizes and data is not None and (left := left_out(data)[0]):
        unused = f" ({left} left out of each epoch)"
    rows["samples"] = ", ".join(f"{size} to {part}{unused * (part == 'train')}" for part, size in sizes.items()) or None
    splits = getattr(data, "_splits", {})
    if splits.get("test") is splits.get("val", ""):
        rows["test"] = "there is no test part; val is tested"
    backward = config.backward
    if (backward.kind, backward.tile, backward.chunk) != (None, None, None):
        blocks = f": {runs_of(backward.blocks)}" if backward.blocks else ""
        cut = [f", {name}={getattr(backward, name)}" for name in ("tile", "chunk") if getattr(backward, name) is not None]
        cut += [", keys=host"] if backward.keys == "host" else []
        rows["backward"] = f"{backward.name}{blocks}{''.join(cut)}"
    if config.compile or kind_of(backward.kind or "") in COMPILED:
        rows["compile"] = "each block, in the first steps, which take long"
    if fits:
        rows["augment"] = ", ".join(_given(config.data, *AUGMENTATION)) or None
        rows["length"] = _length(config.trainer)
        rows["graphs"] = _graphs(config)
        rows["synthesis"] = config.synthesis and _named(run, "synthesis", config.synthesis, "dtype", "split")
        rows["optimizer"] = config.optimizer and _named(run, "optimizer", config.optimizer, "lr", "layer_decay")
        if config.average:
            decay = ", ".join(["exponential", *_given(config.callbacks[config.average], "decay")])
            rows["average"] = f"{decay}; averaged weights are validated, tested and saved"
        rows["schedule"] = config.scheduler and _named(run, "scheduler", config.scheduler, *config.scheduler.arguments)
    products = config.trainer.float32_matmul_precision
    rows["precision"] = config.trainer.precision + (
        "" if products == "highest" else f", products of float32: {products} (TF32)"
    )
    rows["device"] = device_name(config.trainer.accelerator)
    if origin is None and config.model is not None and loads_weights(config.model.plain()):
        source = config.model.arguments.get("pretrained") or config.model.arguments["name"]
        rows["weights"] = f"fine-tuning of {source}" if fits else f"pretrained, {source}"
    rows |= {
        "checkpoint": origin,
        "changed": (fits and origin and ", ".join(changes(config, origin))) or None,
        "processes": run.process and f"{run.process.size}, {config.trainer.strategy}",
        "folder": run.folder,
    }
    show(f"holotrain {run.command}", rows)
    if isinstance(data, TextDataModule) and data.show:
        marks = ("\033[4m", "\033[24m") if console.is_terminal else ("[[", "]]")
        print(*data.shown(*marks), sep="\n\n", end="\n\n")


def _images(data: pl.LightningDataModule | None) -> list[str]:
    """The size of images and the number of classes, where the data tell them."""
    if not isinstance(data, ImageDataModule) or not hasattr(data, "image_shape"):
        return []
    return [" x ".join(map(str, data.image_shape[1:])) + " pixels", counted(data.num_classes, "class")]


def _classes(data: TextDataModule) -> str | None:
    """How many training documents each class has."""
    labels = data.part("train").labels
    if labels is None:
        return None
    counts = np.bincount(labels[labels >= 0], minlength=data.num_classes).tolist()
    named = [f"{name} {count}" for name, count in zip(data.class_names, counts, strict=True)]
    return ", ".join(named[:NAMED]) + f" and {len(named) - NAMED} more" * (len(named) > NAMED)


def _named(run: Run, group: str, config: ObjectConfig, *options: str) -> str:
    """The chosen option of a group, and those of its own options that change something."""
    chosen = run.choices.get(group, config.name)
    return ", ".join([f"auto ({config.name})" if chosen == AUTO else chosen, *_given(config, *options)])


def _given(config: ObjectConfig, *options: str) -> list[str]:
    """The options that are words, or numbers that change something."""
    words = []
    for name in options:
        value = getattr(config, name, None)
        if type(value) in (int, float, str) and value not in ("", NEUTRAL.get(name, 0)):
            words.append(f"{name} {value:g}" if not isinstance(value, str) else f"{name} {value}")
    return words


def _model(config: RunConfig, run: Run, model: nn.Module) -> str:
    whole = parameter_count(model)
    words = [_named(run, "model", config.model, "rule", "depth", "width") if config.model else type(model).__name__]
    words += [str(config.model.arguments["name"])] if config.model and "name" in config.model.arguments else []
    words.append(f"{_large(whole)} parameters")
    learned = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if 0 < learned < whole:
        words.append(f"{_large(learned)} trainable")
    if config.model and config.model.quantised:
        words += [f"{count / whole:.0%} in {bits} bits" for bits, count in quantised_counts(model).items()]
    return ", ".join(words)


def _graphs(config: RunConfig) -> str | None:
    """What is captured as CUDA graphs; a step may show that it cannot be, see the last screen. None: no GPU, not asked for."""
    reason = why_no_graphs(config)
    if not config.trainer.graphs:
        return None if reason else "off; trainer.graphs=auto captures forward and backward"
    return (
        f"eager: {reason}" if reason else "forward and backward, each shape of batches when it is seen again; optimizer eager"
    )


def _length(trainer: ObjectConfig) -> str | None:
    """What ends a training; None: fast_dev_run."""
    limits = [counted(most, unit) for unit in ("epoch", "step") if (most := getattr(trainer, f"max_{unit}s") or 0) > 0]
    limits += [f"{trainer.max_time} (max_time)"] if trainer.max_time is not None else []
    return f"at most {' or '.join(limits)}" if limits else None


def _sizes(data: pl.LightningDataModule | None, command: str) -> dict[str, int]:
    """The number of images, documents or, of packed text, sequences in each part, where the data tell it."""
    sizes = {}
    for part in PARTS.get(command, ()):
        if isinstance(data, TextDataModule) and (counts := data.counts.get(part)):
            packed = -(-counts["tokens"] // data.context)
            sizes[part] = packed if data.layout == "packed" else counts["documents"]
        elif isinstance(data, ImageDataModule):
            with suppress(AttributeError, KeyError, TypeError):  # a user's class need not have it
                sizes[part] = len(data.split(part))  # ty: ignore[invalid-argument-type]: torch declares no length
    return sizes


def _batches(config: RunConfig, run: Run) -> str:
    option, size = config.batch_option
    if run.process is not None and (shares := run.process.size // model_parallel_size(config.trainer, run.process)) > 1:
        size = f"{shares} x {size}"
    if size is None:  # what data of others say of themselves
        return "batches of its own size"
    return f"batches of {size}" if option == "data.batch_size" else f"batches of up to {size} tokens"


def show_end(
    summary: Summary, folder: Path, expensive: Sequence[str] = (), graphs: StepGraphs | None = None, **files: Path
) -> None:
    """Prints the results of summary.json, the most expensive operators, and what else the command has written."""
    rows: dict[str, object] = dict(summary.metrics)
    rows |= {name: getattr(summary, name) for name in RESULTS}
    if summary.step_peak_bytes is None:
        rows["peak_memory_bytes"] = summary.peak_memory_bytes
    rows["graphs"] = graphs and str(graphs)
    rows["most expensive"] = [*expensive] or None
    show(summary.status, rows | files | {"written to": folder / SUMMARY})


def _large(count: int) -> str:
    return f"{count / 1e6:.2f} M" if count >= 1e6 else f"{count / 1e3:.1f} k"
