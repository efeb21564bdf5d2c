"""Builds Lightning's Trainer with its strategy, callbacks and loggers, and checks the device of a run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ProgressBar, WeightAveraging
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, SimpleProfiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from holotrain.callbacks import BestCheckpoint, ConfusionMatrix
from holotrain.callbacks.interrupt import SaveOnSignal
from holotrain.callbacks.shown import EpochLog
from holotrain.callbacks.throughput import peak_flops, training_flops
from holotrain.callbacks.trace import TraceProfiler
from holotrain.checkpoints.distributed import CheckpointFiles
from holotrain.checkpoints.exact_resume import ExactResume
from holotrain.checkpoints.saving import last_checkpoint
from holotrain.config.build import build_model, build_object, data_properties, synthesis_callback, synthesis_of
from holotrain.config.command_options import RunConfig
from holotrain.config.objects import ObjectConfig
from holotrain.config.option_groups import LOW_BIT, TRAINER_OPTIONS, BackwardConfig, is_a, takes
from holotrain.config.signatures import REQUIRED, signature
from holotrain.data.text.module import TextDataModule
from holotrain.errors import UserError, as_user_error, check_choice
from holotrain.folders import LAST_CHECKPOINT
from holotrain.numeric import counted
from holotrain.overlap.tuner import Tuner
from holotrain.parallel.rank import ProcessRank
from holotrain.parallel.stages import Pipeline, check_stages
from holotrain.parallel.strategies import DataParallel, Sharding, TensorParallelError, division, overlapped
from holotrain.targets import TARGET, first_line, instantiate
from holotrain.tasks.task import monitored_by


def device_kind(accelerator: str) -> str:
    """cuda, mps or cpu: the device that this accelerator option selects on this machine."""
    if accelerator in ("auto", "gpu") and torch.cuda.is_available():
        return "cuda"
    if accelerator in ("auto", "gpu", "mps") and torch.backends.mps.is_available():
        return "mps"
    return "cpu"


def device_name(accelerator: str) -> str:
    """The name of the GPU, or the number of CPU threads."""
    kind = device_kind(accelerator)
    if kind == "cuda":
        return torch.cuda.get_device_name()
    return f"cpu, {counted(torch.get_num_threads(), 'thread')}" if kind == "cpu" else kind


def autocast_of(config: ObjectConfig, device: str | None = None) -> AbstractContextManager:
    """The autocast context of a run outside a Trainer; ``device`` replaces the type of the accelerator."""
    dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(config.precision)
    return torch.autocast(device or device_kind(config.accelerator), dtype) if dtype else nullcontext()


def check_device(config: ObjectConfig) -> None:
    """Raises a UserError if the accelerator is missing or does not support the precision."""
    kind = device_kind(config.accelerator)
    if config.accelerator in ("gpu", "mps") and kind == "cpu":
        raise UserError(f"trainer.accelerator={config.accelerator}: there is none here; use trainer.accelerator=cpu")
    if config.precision == "16-mixed" and kind == "cpu":
        raise UserError("trainer.precision=16-mixed: needs a GPU; on the CPU use bf16-mixed or 32-true")
    if config.precision == "64-true" and kind == "mps":
        raise UserError("trainer.precision=64-true: this GPU does not support float64; use 32-true or trainer.accelerator=cpu")
    if config.precision == "bf16-mixed" and kind == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(f"trainer.precision=bf16-mixed: {torch.cuda.get_device_name()} does not support bfloat16; use 16-mixed")


def check_training_device(config: RunConfig) -> None:
    """Raises a UserError if the device is missing or does not support the configuration."""
    check_device(config.trainer)
    on_gpu = device_kind(config.trainer.accelerator) == "cuda"
    for group in ("backward", "synthesis"):
        if getattr(getattr(config, group), "cuda_graph", False) and not on_gpu:
            raise UserError(f"{group}.cuda_graph: needs an NVIDIA GPU; set it to false")
    if getattr(config.optimizer, "target", None) == LOW_BIT and on_gpu and not _c_compiler():
        raise UserError("optimizer.bits: on a GPU its step is compiled, which needs a C compiler; install gcc or set CC")


def _c_compiler() -> str | None:
    """The one that Triton would take."""
    return os.environ.get("CC") or next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None)


def model_parallel_size(config: ObjectConfig, process: ProcessRank) -> int:
    """The number of processes that share a model, by layers (tp) or by blocks (pipeline), and read the same data."""
    size = {"tp": config.tensor_parallel or process.size, "pipeline": config.pipeline_stages or process.size}
    return size.get(config.strategy, 1)


def check_division(config: ObjectConfig, process: ProcessRank | None, model: nn.Module) -> None:
    """Raises a UserError if tensor parallelism cannot shard any layer of the model, or it cannot be divided into stages."""
    if process is None or (ranks := model_parallel_size(config, process)) == 1:
        return
    try:
        if config.strategy == "pipeline":
            with as_user_error("trainer=pipeline"):
                return check_stages(model, ranks)
        division(model, ranks)
    except TensorParallelError as error:
        raise UserError(f"trainer=tp: no layer can be sharded over {ranks} processes: {error}") from error


def build_strategy(config: ObjectConfig, process: ProcessRank | None) -> Strategy | str:
    """Lightning's strategy; "auto" for a single process."""
    if process is None:
        return "auto"
    common: dict[str, Any] = {"timeout": timedelta(seconds=config.timeout)}
    if config.strategy in ("fsdp", "tp"):
        size = model_parallel_size(config, process)
        styles = None  # the tensor parallel layers of torch, without overlap
        if config.overlap is not None:
            styles = overlapped(Tuner() if config.overlap == "auto" else config.overlap, config.signals)
        return Sharding(process.size // size, size, styles, config.sharded_checkpoints, **common)
    if config.strategy == "pipeline":
        return Pipeline(model_parallel_size(config, process), config.pipeline_schedule, config.microbatches, **common)
    return DataParallel(config.compression, **common)


def build_trainer(
    config: ObjectConfig,
    folder: Path,
    callbacks: list[pl.Callback],
    logger: object,
    batches: int | None = None,
    profiler: str | None = None,
    process: ProcessRank | None = None,
) -> pl.Trainer:
    """A trainer that writes its files to ``folder``.

    Args:
        batches: number of batches per epoch; only needed to train.
        profiler: name of the profiler.
        process: rank and size of this process, if several train together.
    """
    check_device(config)
    own = {name: value for name, value in config.arguments.items() if name not in TRAINER_OPTIONS}
    plugins = own.pop("plugins") or []
    with as_user_error("trainer.plugins"):
        plugins = [*instantiate(plugins if isinstance(plugins, list) else [plugins]), CheckpointFiles()]
    changed: dict[str, Any] = {"plugins": plugins, "strategy": build_strategy(config, process), "devices": 1, "num_nodes": 1}
    if process is not None:
        changed |= {"devices": process.local_size, "num_nodes": process.nodes}
        plugins.append(TorchElasticEnvironment())
        if config.precision == "64-true":  # Lightning's ModelParallelStrategy only accepts it as a plugin
            changed["precision"] = None
            plugins.append(DoublePrecision())
    if profiler is not None:
        changed["profiler"] = _profiler(profiler, folder) if process is None or process.is_main else None
    if batches is not None:
        changed |= validation_and_logging(config, batches)
    changed["enable_progress_bar"] = any(isinstance(callback, ProgressBar) for callback in callbacks)
    try:
        own |= changed | {"default_root_dir": folder, "callbacks": callbacks, "logger": logger}
        return instantiate({TARGET: config.target}, **own)
    except (MisconfigurationException, ValueError, OverflowError) as error:  # the last of max_time
        raise UserError(f"trainer: {first_line(error)}") from error


def validation_and_logging(config: ObjectConfig, batches: int) -> dict[str, Any]:
    """Lightning's arguments for when to validate and log: as configured, and at the latest at the end of the training.

    If ``max_epochs`` ends the training and an epoch has fewer batches than ``val_check_interval``, every epoch is validated,
    unless ``check_val_every_n_epoch`` is None.

    Args:
        batches: number of batches per epoch, before limit_train_batches.
    """
    limit = config.overfit_batches or (1.0 if config.limit_train_batches is None else config.limit_train_batches)
    batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    interval = 1.0 if config.val_check_interval is None else config.val_check_interval
    found = {"val_check_interval": interval, "check_val_every_n_epoch": config.check_val_every_n_epoch}
    if not batches or config.fast_dev_run:
        return found
    of_epochs, of_steps = _batches_until_the_end(config, batches)
    last = min((each for each in (of_epochs, of_steps) if each is not None), default=None)
    if last is not None and config.log_every_n_steps is not None:
        steps = max(1, last // config.accumulate_grad_batches)
        found["log_every_n_steps"] = min(config.log_every_n_steps, steps)
    if isinstance(interval, int) and batches < interval and last == of_epochs and config.check_val_every_n_epoch:
        found["val_check_interval"] = interval = 1.0
    if isinstance(interval, int):
        return found | {"val_check_interval": min(interval, last or interval), "check_val_every_n_epoch": None}
    if last is not None and last < batches * config.check_val_every_n_epoch * interval:
        return found | {"val_check_interval": last, "check_val_every_n_epoch": None}
    return found


def _batches_until_the_end(config: ObjectConfig, batches: int) -> tuple[int | None, int | None]:
    """The batches until max_epochs and until max_steps, for ``batches`` an epoch; None: no limit."""
    of_epochs = config.max_epochs * batches if (config.max_epochs or 0) > 0 else None
    if config.max_steps <= 0:
        return of_epochs, None
    steps_an_epoch = -(-batches // config.accumulate_grad_batches)
    epochs, steps = divmod(config.max_steps, steps_an_epoch)
    return of_epochs, epochs * batches + steps * config.accumulate_grad_batches


def _profiler(name: str, folder: Path) -> Profiler:
    if name == "trace":
        return TraceProfiler(folder)
    return {"simple": SimpleProfiler, "advanced": AdvancedProfiler}[name](dirpath=folder, filename="profile")


def build_fit_callbacks(
    config: RunConfig, folder: Path, task: pl.LightningModule, data: pl.LightningDataModule
) -> list[pl.Callback]:
    """The callbacks of a training: those of the configuration, and those that no training goes without.

    They act in this order. An average of the weights leaves the model when its validation ends, so it comes after all that look
    at the validation. A synthesis rewrites gradients, so it comes after all that measure them. Lightning moves those that save
    checkpoints to the end, in this order, so that last.ckpt holds the state of all others.
    """
    callbacks: list[pl.Callback] = []
    for name, chosen in config.callbacks.items():
        if _has_its_metric(chosen, config):
            context = _callback_context(name, chosen, config, folder, task, data)
            callbacks.append(build_object(f"callbacks.{name}", chosen, pl.Callback, **context))
    if config.trainer.enable_progress_bar is False:
        callbacks = [callback for callback in callbacks if not isinstance(callback, ProgressBar | EpochLog)]
    callbacks.sort(key=lambda callback: isinstance(callback, WeightAveraging))
    synthesis = []
    if config.synthesis is not None:
        synthesis.append(synthesis_callback(config.synthesis))
        synthesis_of(config.synthesis, task).remove()  # raises on mistakes before the training starts
    last = folder / LAST_CHECKPOINT
    periods = [callback.last_every_n_steps for callback in callbacks if isinstance(callback, BestCheckpoint)]
    lasts = [last_checkpoint(last, period) for period in (None, *filter(None, periods))]
    return [ExactResume(config.seed), *callbacks, *synthesis, *lasts, SaveOnSignal(last)]


def build_matrices(config: RunConfig) -> list[ConfusionMatrix]:
    """The confusion matrices among the configured callbacks, for an evaluation."""
    ours = f"{ConfusionMatrix.__module__}.{ConfusionMatrix.__name__}"
    return [
        build_object(f"callbacks.{name}", each, ConfusionMatrix) for name, each in config.callbacks.items() if is_a(each, ours)
    ]


def _callback_context(
    name: str, chosen: ObjectConfig, config: RunConfig, folder: Path, task: pl.LightningModule, data: pl.LightningDataModule
) -> dict[str, Any]:
    """What the program knows of a callback's parameters. What takes time is computed only for a callback that has it."""
    parameters = signature(chosen.target).options
    context: dict[str, Any] = {"dirpath": folder / LAST_CHECKPOINT.parent}
    if "monitor" in parameters:
        context |= _metric(name, chosen, task)
    if "count_tokens" in parameters and isinstance(data, TextDataModule):
        context["count_tokens"] = tokens_of
    if "peak_flops" in parameters:
        found = peak_flops(device_name(config.trainer.accelerator), config.trainer.precision)
        context["peak_flops"] = chosen.arguments.get("peak_flops") or found
        if context["peak_flops"] is not None and "model_flops_per_sample" in parameters:  # only MFU and HFU need them
            context |= _flops(config, data)
    return context


def _has_its_metric(chosen: ObjectConfig, config: RunConfig) -> bool:
    """Whether a callback that follows a metric can: without validation, those of the training are all there are."""
    if config.trainer.limit_val_batches != 0 or not takes(chosen, "monitor"):
        return True
    return (chosen.arguments.get("monitor") or "").startswith("train/")


def _metric(name: str, chosen: ObjectConfig, task: pl.LightningModule) -> dict[str, str]:
    """``monitor`` and ``mode``, as given, or those of the first metric that the task names."""
    monitored = monitored_by(task)
    monitor = chosen.arguments.get("monitor") or next(iter(monitored), None)
    if monitor is None:
        if signature(chosen.target).options["monitor"].default is REQUIRED:
            raise UserError(f"callbacks.{name}.monitor: a value is needed; give callbacks.{name}.monitor=...")
        return {}
    if monitored and not monitor.startswith("train/"):
        check_choice(f"callbacks.{name}.monitor", monitor, monitored)
    return {"monitor": monitor} | ({"mode": monitored[monitor]} if monitor in monitored else {})


def _flops(config: RunConfig, data: pl.LightningDataModule) -> dict[str, int]:
    """FLOPs of a sample with and without recomputation; nothing where the shape of samples varies or is not known."""
    text, image_shape = data if isinstance(data, TextDataModule) else None, getattr(data, "image_shape", ())
    if config.model is None or (not image_shape if text is None else text.layout != "packed"):
        return {}
    with torch.device("meta"):
        sample = torch.empty(1, *image_shape) if text is None else torch.zeros(1, text.context, dtype=torch.long)
        stored = build_model(replace(config, backward=BackwardConfig("autograd")), data_properties(data))
        model = build_model(config, data_properties(data))
    stored_flops, flops = training_flops(stored, (sample,)), training_flops(model, (sample,))
    return {"model_flops_per_sample": stored_flops, "hardware_flops_per_sample": flops}


def tokens_of(batch: dict[str, Tensor]) -> Tensor:
    """Number of training tokens in a batch, without padding; on the batch's device, to avoid a synchronization."""
    if "lengths" in batch:
        return batch["lengths"].sum()
    return torch.tensor(batch["tokens"][:, 1:].numel())


def build_loggers(config: RunConfig, folder: Path, sweep: str | None = None) -> list[Logger]:
    """Those of the group ``logger``; ``folder``: that of the run; ``sweep``: name of the sweep that the run is a job of."""
    loggers, run = [], folder.name if sweep is None else f"{sweep}/{folder.name}"
    if config.name is not None:
        run = config.name if sweep is None else f"{config.name}/{folder.name}"
    for name, chosen in config.logger.items():
        context = _logger_context(name, chosen, folder, run) | _tags(chosen, config.tags)
        loggers.append(build_object(f"logger.{name}", chosen, Logger, group=sweep, **context))
        _count_steps_done(loggers[-1])
    return loggers


def _count_steps_done(logger: Logger) -> None:
    """The logger counts as the screen does: steps that were done, and epochs from 1. Lightning (2.6) gives it what the n-th
    step has measured at n - 1, with an epoch that counts from 0."""
    log = logger.log_metrics

    def log_metrics(metrics: dict[str, float], step: int | None = None) -> None:
        if "epoch" in metrics and step is not None:
            metrics, step = metrics | {"epoch": metrics["epoch"] + 1}, step + 1
        log(metrics, step)

    logger.log_metrics = log_metrics


def _logger_context(name: str, chosen: ObjectConfig, folder: Path, run: str) -> dict[str, Any]:
    """What the program knows of a logger's parameters."""
    parameters = signature(chosen.target).options
    context: dict[str, Any] = {"save_dir": folder, "run_name": run}
    context["name"] = run if "project" in parameters else name  # of a run in a project, or of a subfolder
    if "tracking_uri" in parameters and chosen.arguments.get("tracking_uri") is None:
        store = (folder / "mlflow").resolve()
        store.mkdir(parents=True, exist_ok=True)
        context["tracking_uri"] = f"sqlite:///{store / 'mlflow.db'}"  # MLflow 3 refuses a folder of files
        context["artifact_location"] = (store / "artifacts").as_uri()
    return context


def _tags(chosen: ObjectConfig, tags: Sequence[str]) -> dict[str, Any]:
    """The tags of the run, as the logger takes them: a list, or a mapping to values."""
    option = signature(chosen.target).options.get("tags")
    if not tags:
        return {}
    return {"tags": dict.fromkeys(tags, "true") if option and "dict" in option.type.lower() else [*tags]}
