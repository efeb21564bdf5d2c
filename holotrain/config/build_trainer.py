"""Builds Lightning's Trainer, callbacks and loggers from a configuration."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import loggers
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    ProgressBar,
    RichProgressBar,
)
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, SimpleProfiler
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from holotrain.callbacks import (
    DriftMonitor,
    EpochLog,
    ErrorDiffusionMonitor,
    ExactCheckpoint,
    ExactResume,
    MemoryMonitor,
    PaddingMonitor,
    SaveOnSignal,
    ThroughputMonitor,
    TraceProfiler,
    last_checkpoint,
    peak_flops,
    training_flops,
)
from holotrain.checks import described_by, one_of
from holotrain.config.build import build_model
from holotrain.config.build_shown import build_shown
from holotrain.config.build_strategy import build_strategy, spread
from holotrain.config.build_synthesis import build_synthesis
from holotrain.config.chosen import Chosen, made
from holotrain.config.devices import check_device, device_name
from holotrain.config.folders import LAST_CHECKPOINT
from holotrain.config.schema import RunConfig
from holotrain.config.schema.backward import BackwardConfig
from holotrain.config.schema.running import LoggerConfig
from holotrain.config.schema.trainer import OURS
from holotrain.data import TextDataModule
from holotrain.errors import UserError
from holotrain.parallel.checkpoints import CheckpointFiles
from holotrain.parallel.environment import Joined
from holotrain.ranks.place import Place
from holotrain.tasks import Task


def build_trainer(
    config: Chosen,
    folder: Path,
    callbacks: list[pl.Callback],
    logger: object,
    batches: int | None = None,
    profiler: str | None = None,
    place: Place | None = None,
) -> pl.Trainer:
    """A trainer that writes its files to ``folder``.

    Args:
        batches: number of batches per epoch; only needed to train.
        profiler: name of the profiler.
        place: rank and size of this process, if several train together.

    Raises:
        UserError: the device is missing or does not support the precision.
    """
    check_device(config)
    own = {name: value for name, value in config.arguments.items() if name not in OURS}
    changed: dict[str, Any] = {"plugins": [*_plugins(own.pop("plugins")), CheckpointFiles()]}
    changed |= spread(config, place) | {"strategy": build_strategy(config, place)}
    if profiler is not None:
        changed["profiler"] = _profiler(profiler if place is None or place.is_main else None, folder)
    if place is not None:
        changed["plugins"].append(Joined(place))
    if place is not None and config.precision == "64-true":
        # Lightning's ModelParallelStrategy only accepts it as a plugin.
        changed["precision"] = None
        changed["plugins"].append(DoublePrecision())
    if batches is not None:
        changed |= validation(config, batches)
    changed["enable_progress_bar"] = any(isinstance(callback, ProgressBar) for callback in callbacks)
    try:
        return Chosen(config.target, own).make(default_root_dir=folder, callbacks=callbacks, logger=logger, **changed)
    except (MisconfigurationException, ValueError) as error:
        raise UserError(f"trainer: {str(error).strip().splitlines()[0]}") from error


def _plugins(given: Any) -> list[Any]:
    if given is None:
        return []
    with described_by("trainer.plugins"):
        return made(given if isinstance(given, list) else [given])


def validation(config: Chosen, batches: int) -> dict[str, Any]:
    """Lightning's arguments for when to validate: as configured, and at the latest at the end of the training.

    Args:
        batches: number of batches per epoch, before limit_train_batches.
    """
    limit = 1.0 if config.limit_train_batches is None else config.limit_train_batches
    interval = 1.0 if config.val_check_interval is None else config.val_check_interval
    batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    asked = {"val_check_interval": interval, "check_val_every_n_epoch": config.check_val_every_n_epoch}
    if not batches or config.overfit_batches or config.fast_dev_run:
        return asked
    steps_an_epoch = -(-batches // config.accumulate_grad_batches)
    last = config.max_epochs * batches if (config.max_epochs or 0) > 0 else None
    if config.max_steps > 0:
        whole, rest = divmod(config.max_steps, steps_an_epoch)
        needed = whole * batches + rest * config.accumulate_grad_batches
        last = needed if last is None else min(last, needed)
    if isinstance(interval, int):
        return {"val_check_interval": min(interval, last or interval), "check_val_every_n_epoch": None}
    if last is not None and last < batches * config.check_val_every_n_epoch * interval:
        return {"val_check_interval": last, "check_val_every_n_epoch": None}
    return asked


def _profiler(name: str | None, folder: Path) -> Profiler | None:
    if name == "trace":
        return TraceProfiler(folder)
    kind = {None: None, "simple": SimpleProfiler, "advanced": AdvancedProfiler}[name]
    return kind and kind(dirpath=folder, filename="profile")


def build_loggers(config: LoggerConfig, folder: Path, sweep: str | None = None) -> list[loggers.Logger]:
    """The run's loggers; empty for ``kind: none``.

    Args:
        sweep: name of the sweep that the run is a job of.

    Raises:
        UserError: the logger's library is not installed.
    """
    if config.kind == "none":
        return []
    if config.kind == "tensorboard":
        return [loggers.TensorBoardLogger(folder, name="tensorboard", version="", default_hp_metric=False)]
    if config.kind == "csv":
        return [loggers.CSVLogger(folder, name="csv")]
    if importlib.util.find_spec(config.kind) is None:
        raise UserError(f"logger={config.kind}: the package is not installed; pip install 'holotrain[{config.kind}]'")
    name = folder.name if sweep is None else f"{sweep}/{folder.name}"
    if config.kind == "wandb":
        return [loggers.WandbLogger(save_dir=folder, project=config.project, name=name, group=sweep)]
    if config.tracking_uri is not None:
        return [loggers.MLFlowLogger(experiment_name=config.project, run_name=name, tracking_uri=config.tracking_uri)]
    store = (folder / "mlflow").resolve()
    store.mkdir(parents=True, exist_ok=True)
    return [
        loggers.MLFlowLogger(
            experiment_name=config.project,
            run_name=name,
            tracking_uri=f"sqlite:///{store / 'mlflow.db'}",  # MLflow 3 refuses a folder of files
            artifact_location=(store / "artifacts").as_uri(),
        )
    ]


def build_progress(config: RunConfig) -> list[pl.Callback]:
    """The progress bar or the lines per epoch."""
    style = "none" if config.trainer.enable_progress_bar is False else config.callbacks.progress
    if style == "auto":
        style = "bar" if sys.stdout.isatty() else "lines"
    return {"bar": [RichProgressBar()], "lines": [EpochLog()], "none": []}[style]


def build_fit_callbacks(config: RunConfig, folder: Path, task: Task, data: pl.LightningDataModule) -> list[pl.Callback]:
    """The callbacks of a training: measurements, checkpoints, exact resumption.

    Raises:
        UserError: the task does not have the monitored metric.
    """
    settings = config.callbacks
    checkpoint = settings.checkpoint
    callbacks: list[pl.Callback] = [*build_progress(config), ExactResume(config.seed)]
    if settings.memory:
        callbacks.append(MemoryMonitor())
    if settings.drift.enabled and not config.backward.cuda_graph:  # a CUDA graph runs no Python hooks
        callbacks.append(DriftMonitor(threshold=settings.drift.threshold))
    if config.task.kind == "error_diffusion" and not config.backward.cuda_graph:
        callbacks.append(ErrorDiffusionMonitor())
    callbacks += build_shown(config, task, data)
    if config.synthesis.kind != "none":
        callbacks.append(build_synthesis(config.synthesis, task))
    if settings.throughput.enabled:
        callbacks.append(_throughput(config, data))
    if settings.ema.decay is not None:
        callbacks.append(EMAWeightAveraging(decay=settings.ema.decay, update_every_n_steps=settings.ema.every_n_steps))
    if isinstance(data, TextDataModule) and (padding := data.padding):  # it reads the lengths of all documents
        callbacks.append(PaddingMonitor(padding["random"]))
    if config.trainer.limit_val_batches != 0:
        monitor = checkpoint.monitor or next(iter(task.monitored))
        one_of("callbacks.checkpoint.monitor", monitor, task.monitored)
        watched = {"monitor": monitor, "mode": checkpoint.mode or task.monitored[monitor]}
        if settings.patience is not None:
            callbacks.append(EarlyStopping(**watched, patience=settings.patience))
        callbacks.append(
            ExactCheckpoint(
                folder / LAST_CHECKPOINT.parent,
                filename="best-epoch{epoch}-step{step}",  # without =, which Hydra needs quoted
                auto_insert_metric_name=False,
                save_top_k=checkpoint.save_top_k,
                **watched,
            )
        )
    last = folder / LAST_CHECKPOINT
    callbacks.append(last_checkpoint(last))
    if checkpoint.every_n_train_steps is not None:
        callbacks.append(last_checkpoint(last, checkpoint.every_n_train_steps))
    return [*callbacks, *map(_callback, settings.others.items()), SaveOnSignal(last)]


def _callback(named: tuple[str, Chosen]) -> pl.Callback:
    name, other = named
    with described_by(f"callbacks.{name}"):
        callback = other.make()
    if not isinstance(callback, pl.Callback):
        raise UserError(f"callbacks.{name}: {other.target} is not a callback of Lightning but a {type(callback).__name__}")
    return callback


def _throughput(config: RunConfig, data: pl.LightningDataModule) -> ThroughputMonitor:
    """Counts FLOPs only if the device's peak is known, because only MFU and HFU need them."""
    is_text = isinstance(data, TextDataModule)
    counted = {"count_tokens": tokens_of} if is_text else {}
    name = device_name(config.trainer.accelerator)
    peak = config.callbacks.throughput.peak_flops or peak_flops(name, config.trainer.precision)
    if peak is None or (is_text and data.layout == "documents"):  # the length of batches varies
        return ThroughputMonitor(**counted)
    with torch.device("meta"):
        sample = torch.zeros(1, data.context, dtype=torch.long) if is_text else torch.empty(1, *data.image_shape)
        stored, run = (
            build_model(replace(config, backward=way), data) for way in (BackwardConfig("autograd"), config.backward)
        )
    return ThroughputMonitor(
        model_flops_per_sample=training_flops(stored, (sample,)),
        hardware_flops_per_sample=training_flops(run, (sample,)),
        peak_flops=peak,
        **counted,
    )


def tokens_of(batch: dict[str, Tensor]) -> Tensor:
    """Number of training tokens in a batch, without padding; on the batch's device, to avoid a synchronization."""
    if "lengths" in batch:
        return batch["lengths"].sum()
    return torch.tensor(batch["tokens"][:, 1:].numel())
