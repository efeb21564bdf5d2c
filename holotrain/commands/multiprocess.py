"""Runs a command in as many processes as its configuration asks for.

Only one process runs Hydra. It sends the checked configuration of each job to the others, as JSON. So a sweep works with any
number of processes, and all processes of a job share one folder and one configuration.
"""

import importlib
import os
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from holotrain.commands.console import console, quieten
from holotrain.commands.failures import machine_failures
from holotrain.commands.run_folder import Run, alone_in
from holotrain.commands.streams import open_streams
from holotrain.commands.summary import completed, ended
from holotrain.config.build_trainer import (
    backend_of,
    check_processes,
    data_shard_of,
    device_of,
    float32_products,
    nccl_options,
    processes_of,
)
from holotrain.config.command_options import FitConfig, RunConfig
from holotrain.config.structured import structured, to_container
from holotrain.data.sampler import set_data_shard
from holotrain.errors import UserError
from holotrain.parallel.launch import GRACE, ProcessFailed, launch
from holotrain.parallel.process_group import Processes, destroy_group, processes_of_jobs
from holotrain.parallel.rank import ProcessRank, rank_from_environment

MULTIPROCESS_COMMANDS = ("fit", "validate", "test")
"""The commands that support several processes."""


class MultiprocessRunner:
    """Runs jobs, each in one process or in several.

    Args:
        process: rank and size that a launcher (torchrun, srun) gave this process, which is the main one; None: processes are
            started for each job.
        quiet: print nothing to standard output in processes that are started.

    Attributes:
        broken: the launcher's processes cannot run another job.
    """

    def __init__(self, process: ProcessRank | None, quiet: bool = False) -> None:
        self.process, self.quiet = process, quiet
        self.broken = False
        self._jobs: Iterator[Processes] | None = None

    def run(self, command: str, config: RunConfig, run: Run) -> int:
        """Runs one job. Returns the exit status: 1 if a process died.

        Raises:
            UserError: a mistake, in any of the processes; or a run of another program is in the folder.
        """
        with alone_in(run.folder):
            return self._run(command, config, run)

    def _run(self, command: str, config: RunConfig, run: Run) -> int:
        if isinstance(config, FitConfig):
            _require_text(run.folder.absolute())
            if config.resume:
                if words := ended(config.trainer, run.folder):
                    console.print(words)
                    return 0
            elif run.last_checkpoint.exists() or completed(run.folder) is not None:
                raise UserError(f"{run.folder} already holds a run; give another folder, or continue that run with resume=true")
        alone = config.trainer.strategy == "single" or command not in MULTIPROCESS_COMMANDS
        if self.process is None:
            if alone or processes_of(config.trainer) == 1:
                if command in MULTIPROCESS_COMMANDS:
                    check_processes(config, None)
                if not alone:
                    console.print(
                        f"trainer={config.trainer.strategy}: using one process for one device; set trainer.devices for more"
                    )
                return _command(command, config, run)
        elif alone:
            raise UserError(
                f"started as {self.process.size} processes, but trainer=default uses one; use trainer=ddp, fsdp, tp or pipeline"
                if command in MULTIPROCESS_COMMANDS
                else f"{command} runs in one process, but {self.process.size} were started; start it without a launcher"
            )
        check_processes(config, self.process)
        job = {"command": command, "config": to_container(config), "run": vars(run) | {"folder": str(run.folder)}}
        if self.process is not None:
            return self._with_others(self.process, job, command, config, run)
        trainer = config.trainer
        try:
            return launch(__name__, job | {"quiet": self.quiet}, processes_of(trainer), trainer.max_restarts, trainer.timeout)
        except ProcessFailed as failed:
            print(f"{failed.trace}holotrain: {failed}{run.hint()}", file=sys.stderr)
            run.errors.append(str(failed))
            return 1

    def _with_others(self, process: ProcessRank, job: dict[str, Any], command: str, config: RunConfig, run: Run) -> int:
        self.broken = True  # until the job has ended well; processes of which some have failed cannot go on
        self._jobs = self._jobs or processes_of_jobs(process)
        processes = next(self._jobs)
        processes.post("job", job)
        status = _member(processes, command, config, run)
        self.broken = False
        return status

    def close(self) -> None:
        """Releases the launcher's processes, also if they never received a job."""
        if self.process is not None and not self.broken:
            next(self._jobs or processes_of_jobs(self.process)).post("job", None)
        destroy_group()


def follow(process: ProcessRank) -> int:
    """Runs the main process's jobs in another process of a launcher, and prints only why it fails. Returns the exit status."""
    _silence()
    status, hint = 0, str
    try:
        for processes in processes_of_jobs(process):
            try:
                job = processes.read("job")
            except RuntimeError:  # the main process has ended, and with it the store
                break
            if job is None:
                break
            command, config, run = _received(job)
            hint = run.hint
            status = max(status, _member(processes, command, config, run))
    except Exception as error:
        get_error_handler().record_exception(error)  # which torchrun shows
        time.sleep(GRACE)  # the launcher may end this process, because the main one has said the same
        words = f"{type(error).__name__}: {error}".splitlines()[0]
        print(f"holotrain: rank {process.rank} failed: {words}{hint()}", file=sys.stderr)
        status = 2 if isinstance(error, UserError) else 1
    destroy_group()
    return status


def work(job: dict[str, Any]) -> int:
    """Runs a job in this process, one of several that :func:`launch` started. Returns the exit status."""
    open_streams()
    process = rank_from_environment()
    assert process is not None  # `launch` sets the environment
    if job["quiet"] or not process.is_main:
        _silence()
    quieten()
    command, config, run = _received(job)
    processes, attempt = next(processes_of_jobs(process)), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt and isinstance(config, FitConfig):
        continues = config.resume or run.last_checkpoint.exists()
        if processes.agreed("continues", continues):
            config = replace(config, resume=True, ckpt_path=None)
        if process.is_main:
            again = f"restart {attempt} of {config.trainer.max_restarts}"
            origin = run.last_checkpoint if config.resume else "the start"
            print(f"holotrain: a process failed; {again}, from {origin}", file=sys.stderr)
    return _member(processes, command, config, run)


def _member(processes: Processes, command: str, config: RunConfig, run: Run) -> int:
    """Runs a job in this process, one of several. After an error the process group stays, so that the others only wait."""
    trainer = config.trainer
    device = device_of(trainer, processes.process)
    processes.join(backend_of(trainer, device), device, trainer.timeout, run.folder, nccl_options(trainer))
    set_data_shard(*data_shard_of(trainer, processes.process))
    try:
        with processes.mistakes_told():
            status = _command(command, config, replace(run, processes=processes))
    finally:
        set_data_shard()
    processes.leave()
    return status


def _command(command: str, config: RunConfig, run: Run) -> int:
    try:
        with float32_products(config.trainer.float32_matmul_precision), machine_failures(run):
            module = "evaluation" if command in ("validate", "test") else command
            return importlib.import_module(f"holotrain.commands.{module}").run(config, run)
    except SystemExit as ended:
        if isinstance(ended.__context__, KeyboardInterrupt):  # Lightning (2.6) ends Python on Ctrl-C, with status 1
            raise KeyboardInterrupt from ended
        raise


def _received(job: dict[str, Any]) -> tuple[str, RunConfig, Run]:
    run = Run(**job["run"] | {"folder": Path(job["run"]["folder"]), "started": time.monotonic()})
    return job["command"], structured(job["command"], job["config"]), run


def _require_text(folder: Path) -> None:
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise UserError(f"{folder}: its name is not text in UTF-8, and checkpoints hold it; train in another folder") from None


def _silence() -> None:
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    warnings.simplefilter("ignore")
    quieten()
