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

from holotrain.commands.files import alone_in
from holotrain.commands.quiet import quieten
from holotrain.commands.run import Run
from holotrain.commands.screen import console
from holotrain.commands.summary import completed, ended
from holotrain.config.build_strategy import backend_of, check_processes, device_of, nccl_options, processes_of, share_of
from holotrain.config.checkpointed import restore
from holotrain.config.devices import float32_products
from holotrain.config.schema.run import RunConfig
from holotrain.config.typed import container, typed
from holotrain.data.share import set_share
from holotrain.errors import UserError
from holotrain.models.checkpoint_files import recover
from holotrain.parallel.launch import GRACE, ProcessFailed, launch
from holotrain.parallel.place import Place, found
from holotrain.parallel.world import World, destroy_group, worlds

TOGETHER = ("fit", "validate", "test")
"""The commands that support several processes."""


class Together:
    """Runs jobs, each in one process or in several.

    Args:
        place: rank and size that a launcher (torchrun, srun) gave this process, which is the main one; None: processes are
            started for each job.
        quiet: print nothing to standard output in processes that are started.

    Attributes:
        broken: the launcher's processes cannot run another job.
    """

    def __init__(self, place: Place | None, quiet: bool = False) -> None:
        self.place, self.quiet = place, quiet
        self.broken = False
        self._jobs: Iterator[World] | None = None

    def run(self, command: str, config: RunConfig, run: Run) -> int:
        """Runs one job. Returns the exit status: 1 if a process died.

        Raises:
            UserError: a mistake, in any of the processes; or a run of another program is in the folder.
        """
        with alone_in(run.folder):
            return self._run(command, config, run)

    def _run(self, command: str, config: RunConfig, run: Run) -> int:
        if command == "fit":
            recover(run.last_checkpoint)
            if not config.resume and (run.last_checkpoint.exists() or completed(run.folder) is not None):
                raise UserError(f"{run.folder} already holds a run; give another folder, or continue that run with resume=true")
            if config.resume and (words := ended(config.trainer, run.folder)):
                console.print(words)
                return 0
            if config.resume:
                restore(run.last_checkpoint)
        alone = config.trainer.strategy == "single" or command not in TOGETHER
        if self.place is None and (alone or processes_of(config.trainer) == 1):
            if command in TOGETHER:
                check_processes(config, None)
            if not alone:
                console.print(
                    f"trainer={config.trainer.strategy}: using one process for one device; set trainer.devices for more"
                )
            return _command(command, config, run)
        if alone:
            raise UserError(
                f"started as {self.place.size} processes, but trainer=default uses one; use trainer=ddp, fsdp, tp or pipeline"
                if command in TOGETHER
                else f"{command} runs in one process, but {self.place.size} were started; start it without a launcher"
            )
        check_processes(config, self.place)
        posted = {name: value for name, value in vars(run).items() if name != "world"} | {"folder": str(run.folder)}
        job = {"command": command, "config": container(config), "run": posted}
        if self.place is not None:
            return self._with_others(job, command, config, run)
        job |= {"quiet": self.quiet}
        try:
            trainer = config.trainer
            return launch(__name__, job, processes_of(trainer), trainer.max_restarts, trainer.timeout)
        except ProcessFailed as failed:
            print(f"{failed.trace}holotrain: {failed}{run.hint()}", file=sys.stderr)
            run.errors.append(str(failed))
            return 1

    def _with_others(self, job: dict[str, Any], command: str, config: RunConfig, run: Run) -> int:
        self.broken = True  # until the job has ended well; processes of which some have failed cannot go on
        self._jobs = self._jobs or worlds(self.place)
        world = next(self._jobs)
        world.post("job", job)
        status = _member(world, command, config, run)
        self.broken = False
        return status

    def close(self) -> None:
        """Releases the launcher's processes, also if they never received a job."""
        if self.place is not None and not self.broken:
            next(self._jobs or worlds(self.place)).post("job", None)
        destroy_group()


def follow(place: Place) -> int:
    """Runs the main process's jobs in another process of a launcher, and prints only why it fails. Returns the exit status."""
    _silence()
    status, hint = 0, str
    try:
        for world in worlds(place):
            try:
                job = world.read("job")
            except RuntimeError:  # the main process has ended, and with it the store
                break
            if job is None:
                break
            command, config, run = _received(job)
            hint = run.hint
            status = max(status, _member(world, command, config, run))
    except Exception as error:
        get_error_handler().record_exception(error)  # which torchrun shows
        time.sleep(GRACE)  # the launcher may end this process, because the main one has said the same
        words = f"{type(error).__name__}: {error}".splitlines()[0]
        print(f"holotrain: rank {place.rank} failed: {words}{hint()}", file=sys.stderr)
        status = 2 if isinstance(error, UserError) else 1
    destroy_group()
    return status


def work(job: dict[str, Any]) -> int:
    """Runs a job in this process, one of several that :func:`launch` started. Returns the exit status."""
    place = found()
    if job["quiet"] or not place.is_main:
        _silence()
    quieten()
    command, config, run = _received(job)
    world, attempt = next(worlds(place)), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt and command == "fit":
        if place.is_main:
            recover(run.last_checkpoint)
        continues = config.resume or run.last_checkpoint.exists()
        if continues and place.is_main:
            restore(run.last_checkpoint)
        if world.agreed("continues", continues):
            config = replace(config, resume=True, ckpt_path=None)
        if place.is_main:
            again = f"restart {attempt} of {config.trainer.max_restarts}"
            origin = run.last_checkpoint if config.resume else "the start"
            print(f"holotrain: a process failed; {again}, from {origin}", file=sys.stderr)
    return _member(world, command, config, run)


def _member(world: World, command: str, config: RunConfig, run: Run) -> int:
    """Runs a job in this process, one of several. After an error the process group stays, so that the others only wait."""
    trainer = config.trainer
    device = device_of(trainer, world.place)
    world.join(backend_of(trainer, device), device, trainer.timeout, run.folder, nccl_options(trainer))
    set_share(*share_of(trainer, world.place))
    try:
        status = _command(command, config, replace(run, world=world))
    finally:
        set_share()
    world.leave()
    return status


def _command(command: str, config: RunConfig, run: Run) -> int:
    try:
        with float32_products(config.trainer.float32_matmul_precision):
            return importlib.import_module(f"holotrain.commands.{command}").run(config, run)
    except SystemExit as ended:
        if isinstance(ended.__context__, KeyboardInterrupt):  # Lightning (2.6) ends Python on Ctrl-C, with status 1
            raise KeyboardInterrupt from ended
        raise


def _received(job: dict[str, Any]) -> tuple[str, RunConfig, Run]:
    run = Run(**job["run"] | {"folder": Path(job["run"]["folder"])})
    return job["command"], typed(job["command"], job["config"]), run


def _silence() -> None:
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    warnings.simplefilter("ignore")
    quieten()
