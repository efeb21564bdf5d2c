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
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed import is_nccl_available

from holotrain.commands.run import Run, continued, ended, matmul_precision, run_folder_made
from holotrain.commands.screen import console, quieten
from holotrain.config.build import check_device, device_kind, model_parallel_size
from holotrain.config.command_options import FitConfig, RunConfig
from holotrain.config.option_groups import ObjectConfig
from holotrain.config.structured import structured, to_container
from holotrain.data.sampler import set_data_shard
from holotrain.errors import UserError, files_named, printable
from holotrain.numeric import counted
from holotrain.parallel.processes import GRACE, Processes, destroy_group, group_options, run_processes
from holotrain.parallel.rank import ProcessRank

MULTIPROCESS_COMMANDS = ("fit", "validate", "test")
"""The commands that support several processes."""


def run_job(config: RunConfig, run: Run, processes: Processes | None = None, words: list[str] | None = None) -> int:
    """Runs one job of the command line or of a call in Python, in one process or in several. Returns the exit status.
    Raises a UserError after a mistake, in any of the processes.

    Args:
        processes: those of a launcher, whose main process this is; None: there is no launcher.
        words: of the command line, which each process of a job in several runs again; None: such a job is refused.
    """
    supported = run.command in MULTIPROCESS_COMMANDS
    size = processes_of(config.trainer) if processes is None and supported else 1
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
            if config.resume and (message := ended(config, run.folder)):
                console.print(message)
                return 0
        if supported:
            check_processes(config, processes.process if processes else None)
        elif processes is not None:
            raise UserError(f"{run.command} runs in one process; start it without a launcher")
        if processes is not None:
            processes.send_job({"config": to_container(config), "run": vars(run) | {"folder": str(run.folder)}})
            return _run_member(config, run, processes)
        return _run_command(config, run)


def processes_of(trainer: ObjectConfig) -> int:
    """The number of processes to start on this machine."""
    if trainer.strategy != "single" and trainer.devices == "auto":
        return torch.cuda.device_count() if device_kind(trainer.accelerator) == "cuda" else 1
    return 1 if trainer.strategy == "single" else trainer.devices


def check_processes(config: RunConfig, process: ProcessRank | None) -> None:
    """Raises a UserError if there are too few devices, they cannot communicate, or the launcher, whose rank and size are
    ``process``, started another number of processes."""
    trainer = config.trainer
    if trainer.strategy == "single":
        if process is not None:
            raise UserError(f"trainer=default uses one process, not {process.size}; use trainer=ddp, fsdp, tp or pipeline")
        return
    check_device(trainer)
    on_gpu, named = device_kind(trainer.accelerator) == "cuda", f"trainer.devices={trainer.devices}"
    by_nccl = trainer.backend == "nccl" or (on_gpu and trainer.backend == "auto")
    has_nccl = on_gpu and trainer.backend != "gloo" and is_nccl_available()
    if (by_nccl or trainer.nccl_max_ctas or trainer.nccl_high_priority) and not has_nccl:
        raise UserError("trainer.backend=nccl and its options: need NVIDIA GPUs and torch built with NCCL; use gloo alone")
    if trainer.signals and (not on_gpu or trainer.precision != "bf16-mixed"):
        raise UserError("trainer.signals: needs NVIDIA GPUs and trainer.precision=bf16-mixed; set it to false")
    if process is None and (trainer.num_nodes or 1) > 1:
        raise UserError(f"trainer.num_nodes={trainer.num_nodes}: start it with torchrun on every machine")
    count = processes_of(trainer) if process is None else process.local_size
    if process is not None and (trainer.devices not in ("auto", count) or trainer.num_nodes not in (None, process.nodes)):
        raise UserError(f"{named}: the launcher started {counted(count, 'process')} a machine; use trainer.devices=auto")
    size = process.size if process else count
    for option in ("tensor_parallel", "pipeline_stages"):
        if size % (group := getattr(trainer, option) or 1):
            raise UserError(f"trainer.{option}={group}: the number of processes, {size}, is not a multiple of it")
    if on_gpu and count > (gpus := torch.cuda.device_count()):
        raise UserError(f"{named}: this machine has {counted(gpus, 'GPU')}; use at most as many, or trainer.accelerator=cpu")


def follow(process: ProcessRank) -> int:
    """Runs the main process's jobs in another process, and prints only why it fails. Returns the exit status."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    warnings.simplefilter("ignore")
    quieten()
    status, message = 0, ""
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
        time.sleep(4 * GRACE if status == 2 else GRACE)  # a mistake is said by the main process, after which this one is ended
        print(printable(message), file=sys.stderr)
    return status


def _run_member(config: RunConfig, run: Run, processes: Processes) -> int:
    """Runs a job in this process, one of several."""
    process = processes.process
    options = group_options(config.trainer, process, device_kind(config.trainer.accelerator))
    group = model_parallel_size(config.trainer, process)
    set_data_shard(process.rank // group, process.size // group)  # the processes that share a model read the same data
    try:
        with processes.group(**options):
            return _run_command(config, replace(run, process=process))
    finally:
        set_data_shard()


def _run_command(config: RunConfig, run: Run) -> int:
    module = "evaluation" if run.command in ("validate", "test", "predict") else run.command
    try:
        with matmul_precision(config.trainer.float32_matmul_precision):
            return importlib.import_module(f"holotrain.commands.{module}").run(config, run)
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):  # Lightning (2.6) ends Python on Ctrl-C, with status 1
            raise KeyboardInterrupt from end
        raise
