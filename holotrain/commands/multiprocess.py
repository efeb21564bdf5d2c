"""Runs a command in as many processes as its configuration asks for.

Only one process runs Hydra. It starts the others, or torchrun or srun did. They follow it: it sends them the checked
configuration of each job, as JSON. So a sweep works with any number of processes, and all processes of a job share one folder
and one configuration.
"""

import importlib
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed import Store

from holotrain.commands.console import console, quieten
from holotrain.commands.failures import machine_failures
from holotrain.commands.precision import matmul_precision
from holotrain.commands.run_folder import Run, alone_in
from holotrain.commands.summary import completed, ended
from holotrain.config.build_trainer import (
    backend_of,
    check_processes,
    data_shard_of,
    device_of,
    nccl_options,
    processes_of,
)
from holotrain.config.command_options import FitConfig, RunConfig
from holotrain.config.structured import structured, to_container
from holotrain.data.sampler import set_data_shard
from holotrain.errors import UserError
from holotrain.parallel.launch import ProcessDied, started_processes
from holotrain.parallel.process_group import Processes, destroy_group, processes_of_jobs
from holotrain.parallel.rank import ProcessRank, rank_from_environment

MULTIPROCESS_COMMANDS = ("fit", "validate", "test")
"""The commands that support several processes."""

GRACE = 3.0
"""Seconds that a process lives on after its error. The main process says the same, and ends it before that."""


class MultiprocessRunner:
    """Runs jobs, each in one process or in several.

    Args:
        process: rank and size that a launcher (torchrun, srun) gave this process, which is the main one; None: processes are
            started for each job.
        store: where the processes meet; None: the environment variables of the launcher say where.

    Attributes:
        broken: the launcher's processes cannot run another job.
    """

    def __init__(self, process: ProcessRank | None, store: Store | None = None) -> None:
        self.process, self.store = process, store
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
            if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and run.last_checkpoint.exists():
                print(f"holotrain: torchrun started again, from {run.last_checkpoint}", file=sys.stderr)
                config = replace(config, resume=True, ckpt_path=None)
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
        if self.process is not None:
            return self._with_others(command, config, run)
        try:
            with started_processes(command, processes_of(config.trainer)) as store:
                first = MultiprocessRunner(rank_from_environment(), store)
                try:
                    return first._with_others(command, config, run)
                finally:
                    first.close()
        except ProcessDied as death:
            print(f"holotrain: {death}{run.hint()}", file=sys.stderr)
            run.errors.append(str(death))
            return 1

    def _with_others(self, command: str, config: RunConfig, run: Run) -> int:
        assert self.process is not None
        self.broken = True  # until the job has ended well; processes of which some have failed cannot go on
        self._jobs = self._jobs or processes_of_jobs(self.process, self.store)
        processes = next(self._jobs)
        job = {"command": command, "config": to_container(config), "run": vars(run) | {"folder": str(run.folder)}}
        processes.post("job", job)
        status = _member(processes, command, config, run)
        self.broken = False
        return status

    def close(self) -> None:
        """Releases the launcher's processes, also if they never received a job."""
        if self.process is not None and not self.broken:
            next(self._jobs or processes_of_jobs(self.process, self.store)).post("job", None)
        destroy_group()


def follow(process: ProcessRank) -> int:
    """Runs the main process's jobs in another process of a launcher, and prints only why it fails. Returns the exit status."""
    _silence()
    status, hint, line = 0, str, None
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
    except KeyboardInterrupt:  # a terminal sends it to all processes
        return 128 + signal.SIGINT
    except Exception as error:
        status = 2 if isinstance(error, UserError) else 1
        line = f"holotrain: rank {process.rank} failed: {type(error).__name__}: {error}".splitlines()[0] + hint()
    destroy_group()  # so that the others, whose collectives fail then, do not wait
    if line:
        time.sleep(GRACE)
        print(line, file=sys.stderr)
    return status


def _member(processes: Processes, command: str, config: RunConfig, run: Run) -> int:
    """Runs a job in this process, one of several. After an error the process group stays, so that the others only wait."""
    trainer = config.trainer
    device = device_of(trainer, processes.process)
    processes.join(backend_of(trainer, device), device, trainer.timeout, run.folder, nccl_options(trainer))
    set_data_shard(*data_shard_of(trainer, processes.process))
    try:
        with processes.first_failure_raised():
            status = _command(command, config, replace(run, processes=processes))
    finally:
        set_data_shard()
    processes.leave()
    return status


def _command(command: str, config: RunConfig, run: Run) -> int:
    try:
        with matmul_precision(config.trainer.float32_matmul_precision), machine_failures(run):
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
