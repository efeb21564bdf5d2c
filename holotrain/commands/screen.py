"""The start and end screens of the commands."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import lightning.pytorch as pl
from rich.table import Table
from torch import nn

from holotrain.callbacks import trace
from holotrain.commands.console import console, log
from holotrain.commands.memory_limits import runs_of
from holotrain.commands.run_folder import Run
from holotrain.commands.summary import SUMMARY, Summary
from holotrain.config.build_trainer import device_kind, device_name, model_parallel_size
from holotrain.config.command_options import RunConfig
from holotrain.config.fine_tuning import loads_weights
from holotrain.config.objects import ObjectConfig
from holotrain.config.option_groups import COMPATIBLE, ERROR_DIFFUSION, is_a
from holotrain.data.images import ImageDataModule
from holotrain.data.text.module import TextDataModule
from holotrain.models.division import division
from holotrain.models.quantised import parameter_count, quantised_counts
from holotrain.numeric import counted
from holotrain.parallel.rank import ProcessRank

PARTS = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}
"""The parts of the data that a command reads while this screen is shown."""

FEW = 50
"""A validation set of fewer samples has coarse figures: one more that is right is 2 % or more."""

PROFILES = {"profile": "fit-profile.txt", "trace": f"{trace.TRACE}*"}
PROFILES |= {"operators": trace.OPERATORS, "allocations": trace.ALLOCATIONS}
"""Files that a profiler may have written."""


def show_start(
    config: RunConfig, run: Run, model: nn.Module, origin: Path | None, data: pl.LightningDataModule | None = None
) -> None:
    """Prints the settings of the run and, for text, the number of tokens."""
    text = None
    if isinstance(data, TextDataModule):
        parts = ", ".join(f"{_large(counts['tokens'])} to {name}" for name, counts in data.counts.items())
        text = f"tokens: {parts}; vocabulary {data.vocab_size}, context {data.context}"
    named = run.choices.get("model", config.model.name) if config.model else type(model).__name__
    if is_a(config.model, *COMPATIBLE[ERROR_DIFFUSION][0]):
        named += f", rule {config.model.rule}, depth {config.model.depth}, width {config.model.width}"
    sizes = {} if data is None else _sizes(data, PARTS.get(run.command, ()))
    fits = run.command == "fit"
    whole = parameter_count(model)
    learned = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    trainable = f", {_large(learned)} trainable" if 0 < learned < whole else ""
    rows = {
        "name": config.name,
        "tags": ", ".join(config.tags) or None,
        "model": f"{named}, {_large(whole)} parameters{trainable}",
        "task": run.choices.get("task", config.task.name),
        "data": f"{run.choices.get('data', config.data.name)}, {_batches(config, run.process)}",
        "text": text,
        "samples": _samples(sizes),
        "warning": _warning(sizes, hasattr(data, "val_fraction") or hasattr(config.data, "val_fraction")),
        "backward": _backward(config),
        "quantised": config.model and config.model.quantised and _quantised(model, whole),
        "synthesis": _synthesis(config.synthesis) if fits and config.synthesis else None,
        "optimizer": _optimizer(config, config.optimizer, run) if fits and config.optimizer else None,
        "schedule": _schedule(config.scheduler, run) if fits and config.scheduler else None,
        "precision": _precision(config),
        "device": device_name(config.trainer.accelerator),
        "weights": None if origin else _pretrained(config, fits),
        "checkpoint": origin,
        "processes": _processes(config, run.process, model) if run.process else None,
        "folder": run.folder,
    }
    log.info("holotrain %s", shlex.join([run.command, *run.overrides]))
    _show(f"holotrain {run.command}", rows)


def _quantised(model: nn.Module, whole: int) -> str:
    """How many of the ``whole`` parameters have how few bits."""
    shares = [f"{count / whole:.0%} in {bits} bits" for bits, count in quantised_counts(model).items()]
    return f"{', '.join(shares)} (of all parameters)"


def _synthesis(config: ObjectConfig) -> str:
    """The mode of the synthesis, the dtype of its hologram, and what is split off."""
    known = {name: getattr(config, name, None) for name in ("mode", "dtype", "split")}  # a class of one's own may have others
    if known["split"]:
        known["split"] = "not split" if known["split"] == "none" else f"split, on the {known['split']}"
    return ", ".join(filter(None, known.values())) or config.name


def _sizes(data: pl.LightningDataModule, parts: Iterable[str]) -> dict[str, int]:
    """The number of images, documents or, of packed text, sequences in each part, where the data tell it."""
    sizes = {}
    for part in parts:
        if isinstance(data, TextDataModule) and (counts := data.counts.get(part)):
            packed = -(-counts["tokens"] // data.context)
            sizes[part] = packed if data.layout == "packed" else counts["documents"]
        elif isinstance(data, ImageDataModule):
            with suppress(AttributeError, KeyError, TypeError):  # a user's class need not have it
                sizes[part] = len(data.split(part))  # ty: ignore[invalid-argument-type]: torch declares no length
    return sizes


def _samples(sizes: dict[str, int]) -> str | None:
    return ", ".join(f"{size} to {part}" for part, size in sizes.items()) or None


def _warning(sizes: dict[str, int], has_fraction: bool) -> str | None:
    """That the figures of a small validation set are coarse. ``has_fraction``: the data have an option for its share."""
    size = sizes.get("val", FEW)
    if size >= FEW:
        return None
    remedy = "raise data.val_fraction, or give more" if has_fraction else "give more"
    return f"only {counted(size, 'sample')} to validate with, so val/... is coarse; {remedy}"


def _pretrained(config: RunConfig, fits: bool) -> str | None:
    """The pretrained weights that a run without a checkpoint starts from."""
    if config.model is None or not loads_weights(config.model.plain()):
        return None
    source = config.model.arguments.get("pretrained") or config.model.arguments["name"]
    return f"fine-tuning of {source}" if fits else f"pretrained, {source}"


def _processes(config: RunConfig, process: ProcessRank, model: nn.Module) -> str:
    trainer, group = config.trainer, model_parallel_size(config.trainer, process)
    words = [f"{process.size}, {trainer.strategy}"]
    if group > 1:
        words[0] += f" in {process.size // group} groups of {group}" if group < process.size else ""
    if trainer.strategy == "tp" and group > 1:
        words.append("no overlap" if trainer.overlap is None else f"overlapped row groups: {trainer.overlap}")
        if whole := division(model, group).whole:
            words.append(f"not sharded: {', '.join(whole)}")
    if trainer.compression != "none":
        words.append(f"gradient compression: {trainer.compression}")
    if trainer.sharded_checkpoints:
        words.append("sharded checkpoints")
    return "; ".join(words)


def show_end(summary: Summary, folder: Path, expensive: Sequence[str] = (), **files: Path) -> None:
    """Prints the results of summary.json, but no learning rate, the most expensive operators, and what else the
    command has written, by what it holds."""
    results = {name: value for name, value in summary.metrics.items() if not name.startswith("train/lr")}
    rows: dict[str, object] = dict(results)
    for name, value in results.items():
        if isinstance(value, float):
            rows[name] = f"{value:.4f}" if value == 0 or abs(value) >= 1e-3 else f"{value:.3g}"
    if summary.steps is not None and summary.epochs is not None:
        rows["steps"] = f"{summary.steps} in {counted(summary.epochs, 'epoch')}"
    if summary.early_stopping_patience is not None:
        rows["ended"] = f"early, after {counted(summary.early_stopping_patience, 'validation')} without improvement"
    if summary.samples_per_second is not None and summary.step_seconds is not None:
        tokens = f"{summary.tokens_per_second:.0f} tokens/s, " if summary.tokens_per_second is not None else ""
        rows["throughput"] = f"{tokens}{summary.samples_per_second:.1f} samples/s, {summary.step_seconds * 1e3:.1f} ms per step"
    if summary.step_peak_bytes is not None:
        planned = summary.planned_step_bytes
        words = "" if planned is None else f" (planned: at most {planned / 2**20:.0f} MiB, with scratch)"
        rows["peak of a step"] = f"{summary.step_peak_bytes / 2**20:.0f} MiB of tensors{words}"
    if summary.peak_memory_bytes is not None:
        of = " (whole process)" if summary.device.startswith("cpu") else ""
        rows["peak memory"] = f"{summary.peak_memory_bytes / 2**20:.0f} MiB{of}"
    rows["time"] = f"{summary.seconds:.1f} s"
    rows["checkpoint"] = summary.checkpoint
    rows["most expensive"] = "\n".join(expensive) or None
    rows |= {name: next(folder.glob(pattern), None) for name, pattern in PROFILES.items()}
    rows |= files
    rows["written to"] = folder / SUMMARY
    _show(summary.status, rows)


def _show(title: str, rows: Mapping[str, object]) -> None:
    """Prints the rows that have a value, and logs them."""
    console.print(table(title, rows))
    log.info("\n  ".join([title, *(f"{name}: {value}" for name, value in rows.items() if value is not None)]))


def _backward(config: RunConfig) -> str | None:
    backward = config.backward
    blocks = f": {runs_of(backward.blocks)}" if backward.blocks else ""
    tile = "" if backward.tile is None else f", tile={backward.tile}"
    return None if backward.kind is None else f"{backward.kind}{blocks}{tile}"


def _batches(config: RunConfig, process: ProcessRank | None) -> str:
    option, size = config.batch_option
    if process is not None and (shares := process.size // model_parallel_size(config.trainer, process)) > 1:
        size = f"{shares} x {size}"
    if size is None:  # what data of others say of themselves
        return "batches of its own size"
    return f"batches of {size}" if option == "data.batch_size" else f"batches of up to {size} tokens"


def table(title: str, rows: Mapping[str, object]) -> Table:
    """The rows that have a value."""
    shown = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 2))
    shown.add_column()
    shown.add_column(overflow="fold")
    for name, value in rows.items():
        if value is not None:
            shown.add_row(name, str(value))
    return shown


def _optimizer(config: RunConfig, optimizer: ObjectConfig, run: Run) -> str:
    name, rate = run.choices.get("optimizer", optimizer.name), getattr(optimizer, "lr", None)
    words = [name, *([] if rate is None else [f"learning rate {rate:g}"])]
    return ", ".join([*words, "in the backward"] if config.steps_in_backward else words)


def _precision(config: RunConfig) -> str:
    found, products = config.trainer.precision, config.trainer.float32_matmul_precision
    if products != "highest":
        return f"{found}, products of float32: {products} (TF32)"
    if found == "bf16-mixed" and device_kind(config.trainer.accelerator) == "cuda":
        return f"{found} (trainer.precision=32-true for float32 throughout)"
    return found


def _schedule(scheduler: ObjectConfig, run: Run) -> str:
    options = [f"{name} {value:g}" for name, value in scheduler.arguments.items() if type(value) in (int, float) and value]
    return ", ".join([run.choices.get("scheduler", scheduler.name), *options])


def _large(count: int) -> str:
    return f"{count / 1e6:.2f} M" if count >= 1e6 else f"{count / 1e3:.1f} k"
