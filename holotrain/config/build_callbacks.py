"""Builds the callbacks and the loggers of a run."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ProgressBar, WeightAveraging
from lightning.pytorch.loggers import Logger
from torch import Tensor

from holotrain.callbacks import BestCheckpoint, ConfusionMatrix
from holotrain.callbacks.interrupt import SaveOnSignal
from holotrain.callbacks.shown import EpochLog
from holotrain.callbacks.throughput import peak_flops, training_flops
from holotrain.checkpoints.exact_resume import ExactResume
from holotrain.checkpoints.saving import last_checkpoint
from holotrain.config.build import build_model, build_object, data_properties, synthesis_callback, synthesis_of
from holotrain.config.build_trainer import device_name
from holotrain.config.command_options import RunConfig
from holotrain.config.objects import ObjectConfig
from holotrain.config.option_groups import BackwardConfig, is_a, takes
from holotrain.config.signatures import REQUIRED, signature
from holotrain.data.text.module import TextDataModule
from holotrain.errors import UserError, check_choice
from holotrain.folders import LAST_CHECKPOINT
from holotrain.tasks.task import monitored_by


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
