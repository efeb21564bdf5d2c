"""Builds Lightning's strategies, and checks the number of processes and devices."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch import nn

from holotrain.checks import naming_group
from holotrain.config.build_trainer import check_device, device_kind
from holotrain.config.chosen import Chosen
from holotrain.config.commands import RunConfig
from holotrain.errors import UserError
from holotrain.models.division import Indivisible, division
from holotrain.overlap import Tuner
from holotrain.parallel.rank import ProcessRank
from holotrain.parallel.stages import Pipeline, check_stages, equal_parts
from holotrain.parallel.strategies import DataParallel, Sharding, overlapped


def processes_of(config: Chosen) -> int:
    """The number of processes to start on this machine."""
    if config.strategy == "single":
        return 1
    if config.devices != "auto":
        return config.devices
    return torch.cuda.device_count() if device_kind(config.accelerator) == "cuda" else 1


def check_processes(config: RunConfig, process: ProcessRank | None) -> None:
    """
    Args:
        process: rank and size from a launcher, if any.

    Raises:
        UserError: there are too few devices, they cannot communicate, or the launcher started a different number of processes.
    """
    trainer = config.trainer
    if trainer.strategy == "single":
        return
    check_device(trainer)
    kind, named = device_kind(trainer.accelerator), f"trainer.devices={trainer.devices}"
    if kind == "mps":
        raise UserError(f"trainer={trainer.strategy}: not supported on Apple GPUs; use trainer.accelerator=cpu")
    if trainer.backend == "nccl" and kind != "cuda":
        raise UserError("trainer.backend=nccl: needs NVIDIA GPUs, and this run is on the CPU; use gloo")
    if trainer.signals and (kind != "cuda" or trainer.precision != "bf16-mixed"):
        raise UserError("trainer.signals: needs NVIDIA GPUs and trainer.precision=bf16-mixed; set it to false")
    bounded = [name for name in ("nccl_max_ctas", "nccl_high_priority") if getattr(trainer, name)]
    if bounded and (kind != "cuda" or trainer.backend == "gloo"):
        raise UserError(f"trainer.{bounded[0]}: needs NVIDIA GPUs and trainer.backend=nccl")
    if not dist.is_available() or (kind == "cuda" and trainer.backend != "gloo" and not dist.is_nccl_available()):
        raise UserError(f"trainer={trainer.strategy}: this build of torch has no distributed support; use trainer=default")
    count = processes_of(trainer) if process is None else process.local_size
    if process is None and (trainer.num_nodes or 1) > 1:
        raise UserError(f"trainer.num_nodes={trainer.num_nodes}: start it with torchrun or srun on every machine")
    if trainer.max_restarts and (process is not None or count == 1):
        raise UserError(
            "trainer.max_restarts: needs several devices"
            if process is None
            else "trainer.max_restarts: what started the processes must restart them, such as torchrun --max-restarts"
        )
    if process is not None and (trainer.devices not in ("auto", count) or trainer.num_nodes not in (None, process.nodes)):
        machines = f" on each of {process.nodes} machines" if process.nodes > 1 else ""
        raise UserError(f"{named}: the launcher started {count} processes{machines}; use trainer.devices=auto")
    size = process.size if process else count
    for option in ("tensor_parallel", "pipeline_stages"):
        if size % (asked := getattr(trainer, option) or 1):
            raise UserError(f"trainer.{option}={asked}: {size} processes are not a multiple of it")
    if trainer.strategy == "pipeline" and trainer.pipeline_schedule == "1f1b":
        _check_microbatches(config, trainer.pipeline_stages or size)
    if kind == "cuda" and count > torch.cuda.device_count():
        raise UserError(
            f"{named}: this machine has {torch.cuda.device_count()} GPUs; use at most as many, or trainer.accelerator=cpu"
        )


def _check_microbatches(config: RunConfig, stages: int) -> None:
    """
    Raises:
        UserError: the batches give fewer microbatches than there are stages, which 1F1B needs.
    """
    asked, batch = config.trainer.microbatches or 2 * stages, getattr(config.data, "batch_size", None)
    if asked < stages:
        raise UserError(f"trainer.microbatches={asked}: 1f1b needs at least one for each of {stages} stages")
    if isinstance(batch, int) and equal_parts(batch, asked) < stages:
        raise UserError(
            f"data.batch_size={batch}: {stages} stages need at least as many microbatches of equal size; "
            f"use {-(-batch // stages) * stages}"
        )


def device_of(config: Chosen, process: ProcessRank) -> torch.device:
    """The device of this process."""
    return torch.device("cuda", process.local_rank) if device_kind(config.accelerator) == "cuda" else torch.device("cpu")


def backend_of(config: Chosen, device: torch.device) -> str:
    """The name of the communication backend."""
    if config.backend != "auto":
        return config.backend
    return "nccl" if device.type == "cuda" else "gloo"


def nccl_options(config: Chosen) -> dist.ProcessGroupNCCL.Options | None:
    """How NCCL's kernels share the GPU; None: its own choice.

    The groups of a device mesh are split from the group of all processes and take these options over.
    """
    if config.nccl_max_ctas is None and not config.nccl_high_priority:
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=config.nccl_high_priority)
    if config.nccl_max_ctas is not None:
        options.config.min_ctas, options.config.max_ctas = 1, config.nccl_max_ctas
    options._timeout = timedelta(seconds=config.timeout)  # torch warns of another one than that of the group
    return options


def share_of(config: Chosen, process: ProcessRank) -> tuple[int, int]:
    """Which shard of the data this process reads, and the number of shards."""
    group = group_of(config, process)
    return process.rank // group, process.size // group


def group_of(config: Chosen, process: ProcessRank) -> int:
    """The number of processes that share a model, by layers (tp) or by blocks (pipeline), and read the same data."""
    size = {"tp": config.tensor_parallel or process.size, "pipeline": config.pipeline_stages or process.size}
    return size.get(config.strategy, 1)


def left_whole(config: Chosen, process: ProcessRank, model: nn.Module) -> list[str]:
    """The layers that tensor parallelism does not shard, each with the reason."""
    ranks = group_of(config, process) if config.strategy == "tp" else 1
    return division(model, ranks).whole if ranks > 1 else []


def check_division(config: Chosen, process: ProcessRank | None, model: nn.Module) -> None:
    """
    Raises:
        UserError: tensor parallelism cannot shard any layer of the model, or it cannot be divided into stages.
    """
    if process is None or (ranks := group_of(config, process)) == 1:
        return
    try:
        if config.strategy == "pipeline":
            with naming_group("trainer=pipeline"):
                return check_stages(model, ranks)
        division(model, ranks)
    except Indivisible as error:
        raise UserError(f"trainer=tp: no layer can be sharded over {ranks} processes: {error}") from error


def build_strategy(config: Chosen, process: ProcessRank | None) -> Strategy | str:
    """Lightning's strategy; "auto" for a single process."""
    if process is None:
        return "auto"
    common: dict[str, Any] = {"timeout": timedelta(seconds=config.timeout)}
    if config.strategy in ("fsdp", "tp"):
        size = group_of(config, process)
        styles = None  # the tensor parallel layers of torch, without overlap
        if config.overlap is not None:
            styles = overlapped(Tuner() if config.overlap == "auto" else config.overlap, config.signals)
        return Sharding(process.size // size, size, styles, config.sharded_checkpoints, **common)
    if config.strategy == "pipeline":
        return Pipeline(group_of(config, process), config.pipeline_schedule, config.microbatches, **common)
    return DataParallel(config.compression, **common)
