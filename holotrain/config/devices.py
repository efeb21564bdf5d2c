"""The device of a run and its processes, checked, and when its trainer validates and logs."""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from torch import nn

from holotrain.config.command_options import RunConfig
from holotrain.config.objects import ObjectConfig
from holotrain.config.option_groups import LOW_BIT
from holotrain.errors import as_user_error, refuse
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
    """Raises a UserError if the accelerator is missing or does not support the precision."""
    kind, precision = device_kind(config.accelerator), config.precision
    lacks_bfloat16 = kind == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
    refuse(
        {
            f"trainer.accelerator={config.accelerator}: there is none here; use trainer.accelerator=cpu": (
                config.accelerator in ("gpu", "mps") and kind == "cpu"
            ),
            "trainer.precision=16-mixed: needs a GPU; use bf16-mixed or 32-true": precision == "16-mixed" and kind == "cpu",
            "trainer.precision=64-true: this GPU has no float64; use 32-true": precision == "64-true" and kind == "mps",
            "trainer.precision=bf16-mixed: this GPU has no bfloat16; use 16-mixed": precision == "bf16-mixed"
            and lacks_bfloat16,
        }
    )


def check_training_device(config: RunConfig) -> None:
    """Raises a UserError if the device does not support the configuration."""
    on_gpu = device_kind(config.trainer.accelerator) == "cuda"
    compiler = os.environ.get("CC") or any(map(shutil.which, ("gcc", "clang", "cc")))  # as Triton looks for one
    low_bit = getattr(config.optimizer, "target", None) == LOW_BIT
    refuse(
        {
            "backward.cuda_graph: needs an NVIDIA GPU; set it to false": config.backward.cuda_graph and not on_gpu,
            "synthesis.cuda_graph: needs an NVIDIA GPU; set it to false": (
                getattr(config.synthesis, "cuda_graph", False) and not on_gpu
            ),
            "optimizer.bits: on a GPU its step needs a C compiler; install gcc or set CC": low_bit and on_gpu and not compiler,
        }
    )


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
