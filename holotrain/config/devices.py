"""The device of a run and its processes, checked, and when its trainer validates and logs."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from torch import nn

from holotrain.config.option_groups import ObjectConfig
from holotrain.errors import UserError, as_user_error
from holotrain.numeric import counted
from holotrain.overlap.tuner import Tuner
from holotrain.parallel.rank import ProcessRank
from holotrain.parallel.stages import Pipeline, check_stages
from holotrain.parallel.strategies import DataParallel, Sharding, division, overlapped


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
    """Raises a UserError if the accelerator is missing."""
    if config.accelerator in ("gpu", "mps") and device_kind(config.accelerator) == "cpu":
        raise UserError(f"trainer.accelerator={config.accelerator}: there is none here; use trainer.accelerator=cpu")


def model_parallel_size(config: ObjectConfig, process: ProcessRank) -> int:
    """The number of processes that share a model, by layers (tp) or by blocks (pipeline), and read the same data."""
    size = {"tp": config.tensor_parallel or process.size, "pipeline": config.pipeline_stages or process.size}
    return size.get(config.strategy, 1)


def check_division(config: ObjectConfig, process: ProcessRank | None, model: nn.Module) -> None:
    """Raises a UserError if tensor parallelism cannot shard any layer of the model, or it cannot be divided into stages."""
    if process is not None and (ranks := model_parallel_size(config, process)) > 1:
        with as_user_error(f"trainer={config.strategy}: the model cannot be divided among {counted(ranks, 'process')}"):
            (check_stages if config.strategy == "pipeline" else division)(model, ranks)


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


def validation_and_logging(config: ObjectConfig, batches: int) -> dict[str, Any]:
    """Lightning's arguments for when to validate and log: as configured, and at the latest at the end of the training.

    If ``max_epochs`` ends the training and an epoch has fewer batches than ``val_check_interval``, every epoch is validated.

    Args:
        batches: number of batches per epoch, before limit_train_batches.
    """
    limit = config.overfit_batches or (1.0 if config.limit_train_batches is None else config.limit_train_batches)
    batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    if not batches or config.fast_dev_run:
        return {}
    interval = 1.0 if config.val_check_interval is None else config.val_check_interval
    every, accumulated = config.check_val_every_n_epoch, config.accumulate_grad_batches
    last = of_epochs = config.max_epochs * batches if (config.max_epochs or 0) > 0 else math.inf
    if config.max_steps > 0:
        epochs, steps = divmod(config.max_steps, -(-batches // accumulated))  # the last batches of an epoch step as well
        last = min(last, epochs * batches + steps * accumulated)
    found = {}
    if config.log_every_n_steps and last < math.inf:
        found["log_every_n_steps"] = min(config.log_every_n_steps, max(1, last // accumulated))
    if isinstance(interval, int) and batches < interval and last == of_epochs < math.inf and every:
        interval = 1.0
    if isinstance(interval, float) and batches * (every or 1) * interval <= last:
        return found | {"val_check_interval": interval, "check_val_every_n_epoch": every}
    interval = last if isinstance(interval, float) else min(interval, last)
    return found | {"val_check_interval": interval, "check_val_every_n_epoch": None}
