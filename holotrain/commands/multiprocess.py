"""Runs a command in one process or in several, which it checks, in the precision that it names.

``trainer.devices=2`` starts the command line again in two processes, as torchrun does. Of these only the main one runs Hydra.
The others get the checked configuration of each job from it, as JSON. So all processes of a job share one folder.
"""

import importlib
import os
import signal
import sys
import time
import warnings
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from holotrain.commands.run import Run, continued, ended, run_folder_made
from holotrain.commands.screen import console, quieten
from holotrain.config.build_trainer import check_device, device_kind, model_parallel_size
from holotrain.config.command_options import FitConfig, RunConfig
from holotrain.config.objects import ObjectConfig
from holotrain.config.structured import structured, to_container
from holotrain.data.sampler import set_data_shard
from holotrain.errors import UserError, files_named
from holotrain.numeric import counted
from holotrain.parallel.processes import GRACE, Processes, destroy_group, run_processes
from holotrain.parallel.rank import ProcessRank

MULTIPROCESS_COMMANDS = ("fit", "validate", "test")
"""The commands that support several processes."""


def run_job(config: RunConfig, run: Run, processes: Processes | None = None, words: list[str] | None = None) -> int:
    """Runs one job of the command line or of a call in Python, in one process or in several. Returns the exit status.

    Args:
        processes: those of a launcher, whose main process this is; None: there is no launcher.
        words: of the command line, which each process of a job in several runs again; None: such a job is refused.

    Raises:
        UserError: a mistake, in any of the processes.
    """
    size = processes_of(config.trainer) if processes is None and run.command in MULTIPROCESS_COMMANDS else 1
    if size > 1 and words is not None:
        check_processes(config, None)
        try:
            return run_processes(words, size)
        except UserError as error:
            raise UserError(f"{error}{run.hint()}") from None
    with files_named(), run_folder_made(run.folder):
        if size > 1:
            command = f"torchrun --standalone --nproc-per-node {size} -m holotrain {run.command}"
            raise UserError(f"trainer.devices={size}: a sweep and a call in Python start no processes; use {command}")
        if isinstance(config, FitConfig):
            config = continued(config, run)
        if isinstance(config, FitConfig) and config.resume and (message := ended(config, run.folder)):
            console.print(message)
            return 0
        if run.command in MULTIPROCESS_COMMANDS:
            check_processes(config, processes.process if processes else None)
        elif processes is not None:
            raise UserError(f"{run.command} runs in one process; start it without a launcher")
        if processes is not None:
            processes.send_job({"config": to_container(config), "run": vars(run) | {"folder": str(run.folder)}})
            return _run_member(config, run, processes)
        if run.command in MULTIPROCESS_COMMANDS and config.trainer.strategy != "single":
            console.print(f"trainer={config.trainer.strategy}: using one process for one device; set trainer.devices for more")
        return _run_command(config, run)


def processes_of(config: ObjectConfig) -> int:
    """The number of processes to start on this machine."""
    if config.strategy == "single":
        return 1
    if config.devices != "auto":
        return config.devices
    return torch.cuda.device_count() if device_kind(config.accelerator) == "cuda" else 1


def check_processes(config: RunConfig, process: ProcessRank | None) -> None:
    """Raises a UserError if there are too few devices, they cannot communicate, or the launcher, whose rank and size are
    ``process``, started another number of processes."""
    trainer = config.trainer
    if trainer.strategy == "single":
        if process is not None:
            raise UserError(
                f"started as {process.size} processes, but trainer=default uses one; use trainer=ddp, fsdp, tp or pipeline"
            )
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
    if kind == "cuda" and trainer.backend != "gloo" and not dist.is_nccl_available():
        raise UserError(f"trainer={trainer.strategy}: this build of torch has no NCCL; use trainer.backend=gloo")
    count = processes_of(trainer) if process is None else process.local_size
    if process is None and (trainer.num_nodes or 1) > 1:
        raise UserError(f"trainer.num_nodes={trainer.num_nodes}: start it with torchrun on every machine")
    if process is not None and (trainer.devices not in ("auto", count) or trainer.num_nodes not in (None, process.nodes)):
        machines = f" on each of {process.nodes} machines" if process.nodes > 1 else ""
        raise UserError(f"{named}: the launcher started {counted(count, 'process')}{machines}; use trainer.devices=auto")
    size = process.size if process else count
    for option in ("tensor_parallel", "pipeline_stages"):
        if size % (group_size := getattr(trainer, option) or 1):
            raise UserError(f"trainer.{option}={group_size}: the number of processes, {size}, is not a multiple of it")
    if kind == "cuda" and count > (gpus := torch.cuda.device_count()):
        raise UserError(f"{named}: this machine has {counted(gpus, 'GPU')}; use at most as many, or trainer.accelerator=cpu")


def process_group_options(config: ObjectConfig, process: ProcessRank) -> dict[str, Any]:
    """Arguments of ``torch.distributed.init_process_group``. With CUDA, NCCL is told its device."""
    is_cuda = device_kind(config.accelerator) == "cuda"
    backend = config.backend if config.backend != "auto" else "nccl" if is_cuda else "gloo"
    timeout = timedelta(seconds=config.timeout)
    options = None
    if config.nccl_max_ctas is not None or config.nccl_high_priority:
        # The groups of a device mesh are split from the group of all processes and take these options over.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=config.nccl_high_priority)
        options._timeout = timeout  # torch warns of another one than that of the group
        if config.nccl_max_ctas is not None:
            options.config.min_ctas, options.config.max_ctas = 1, config.nccl_max_ctas
    device = torch.device("cuda", process.local_rank) if is_cuda else None
    return {"backend": backend, "timeout": timeout, "pg_options": options, "device_id": device}


def follow(process: ProcessRank) -> int:
    """Runs the main process's jobs in another process, and prints only why it fails. Returns the exit status."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    warnings.simplefilter("ignore")
    quieten()
    status, message = 0, None
    try:
        processes = Processes(process)
        while (job := processes.receive_job()) is not None:
            run = Run(**job["run"] | {"folder": Path(job["run"]["folder"]), "started": time.monotonic()})
            status = max(status, _run_member(structured(run.command, job["config"]), run, processes))
    except KeyboardInterrupt:  # a terminal sends it to all processes
        return 128 + signal.SIGINT
    except Exception as error:
        status = 2 if isinstance(error, UserError) else 1
        message = f"holotrain: rank {process.rank} failed: {error}".splitlines()[0]
    destroy_group()  # so that the others, whose collectives fail then, do not wait
    if message:
        time.sleep(GRACE)
        print(message, file=sys.stderr)
    return status


def _run_member(config: RunConfig, run: Run, processes: Processes) -> int:
    """Runs a job in this process, one of several."""
    options = process_group_options(config.trainer, processes.process)
    if options["device_id"] is not None:
        torch.cuda.set_device(options["device_id"])
    process = processes.process
    group = model_parallel_size(config.trainer, process)
    set_data_shard(process.rank // group, process.size // group)  # the processes that share a model read the same data
    try:
        with processes.group(**options):
            return _run_command(config, replace(run, process=process))
    finally:
        set_data_shard()


@contextmanager
def matmul_precision(precision: str) -> Generator[None]:
    """Inside, products and convolutions of float32 have this precision, one of ``torch.set_float32_matmul_precision``; with
    ``highest`` nothing is in TF32, in which torch alone computes convolutions. Afterwards it is as before, unless the caller
    has used ``fp32_precision``: then torch refuses to read it."""
    cudnn = torch.backends.cudnn
    before = None
    with suppress(RuntimeError):
        before = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    torch.set_float32_matmul_precision(precision)
    cudnn.allow_tf32 = precision != "highest"
    try:
        yield
    finally:
        if before is not None:
            torch.set_float32_matmul_precision(before[0])
            cudnn.allow_tf32 = before[1]


def _run_command(config: RunConfig, run: Run) -> int:
    try:
        with matmul_precision(config.trainer.float32_matmul_precision):
            module = "evaluation" if run.command in ("validate", "test") else run.command
            return importlib.import_module(f"holotrain.commands.{module}").run(config, run)
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):  # Lightning (2.6) ends Python on Ctrl-C, with status 1
            raise KeyboardInterrupt from end
        raise
