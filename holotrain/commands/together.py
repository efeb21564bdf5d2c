"""Runs a command in as many processes as its configuration asks for.

Only one process runs Hydra. It sends the checked configuration of each job to the others, as JSON. So a sweep works with any
number of processes, and all processes of a job share one folder and one configuration.
"""

import importlib
import os
import signal
import sys
import time
import traceback
import warnings
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store

from holotrain.commands.quiet import quieten
from holotrain.commands.run import Run
from holotrain.commands.screen import console
from holotrain.commands.summary import ended
from holotrain.config.build_strategy import backend_of, check_processes, device_of, processes_of, share_of
from holotrain.config.schema.run import RunConfig
from holotrain.config.typed import container, typed
from holotrain.data.share import set_share
from holotrain.errors import UserError
from holotrain.parallel.launch import GRACE, ProcessFailed, launch
from holotrain.parallel.place import Place, found
from holotrain.parallel.world import World, connected
from holotrain.ranks.shards import recover

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
        self._jobs: Jobs | None = None

    def run(self, command: str, config: RunConfig, run: Run) -> int:
        """Runs one job. Returns the exit status: 1 if a process died.

        Raises:
            UserError: a mistake, in any of the processes.
        """
        if command == "fit" and config.resume:
            recover(run.last_checkpoint)
            if words := ended(config.trainer, run.folder):
                console.print(words)
                return 0
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
                f"started as {self.place.size} processes, but trainer=default uses one; use trainer=ddp, fsdp or tp"
                if command in TOGETHER
                else f"{command} runs in one process, but {self.place.size} were started; start it without a launcher"
            )
        check_processes(config, self.place)
        posted = _posted(command, config, run)
        if self.place is not None:
            self.broken = True  # until they have met
            self._jobs = self._jobs or Jobs(self.place)
            self._jobs.post(posted)
            status = self._jobs.run(command, config, run)
            self.broken = self._jobs.broken
            return status
        posted |= {"quiet": self.quiet, "before": _written(run.last_checkpoint)}
        try:
            return launch(__name__, posted, processes_of(config.trainer), config.trainer.max_restarts)
        except ProcessFailed as failed:
            print(f"{failed.trace}holotrain: {failed}{run.hint()}", file=sys.stderr)
            run.errors.append(str(failed))
            return 1

    def close(self) -> None:
        """Releases the launcher's processes, also if they never received a job."""
        if self.place is not None and not self.broken:
            jobs = self._jobs or Jobs(self.place)
            jobs.post(None)
            jobs.all_through(GRACE)  # this process may host the store


class Jobs:
    """The jobs of processes that torchrun or srun started: one after the other, the same in all.

    Raises:
        UserError: they cannot reach each other.
    """

    def __init__(self, place: Place) -> None:
        self.place, self.store, self.number, self.broken = place, connected(), 0, False

    @property
    def world(self) -> World:
        return World(self.place, self._of_job())

    def _of_job(self) -> Store:
        return PrefixStore(str(self.number), self.store)

    def post(self, job: dict[str, Any] | None) -> None:
        """Sends a job to the other processes. None: there is no other."""
        self.world.post("job", job)

    def all_through(self, seconds: float) -> bool:
        """Whether all processes call this within these seconds."""
        store = self._of_job()
        store.set(f"through/{self.place.rank}", "")
        try:
            store.wait([f"through/{rank}" for rank in range(self.place.size)], timedelta(seconds=seconds))
        except RuntimeError:
            return False
        return True

    def run(self, command: str, config: RunConfig, run: Run) -> int:
        """Runs the job in this process. Returns its exit status."""
        seconds = config.trainer.timeout
        try:
            status = _member(self.world, command, config, run)
        except Exception as error:
            seconds = 4 * GRACE
            if isinstance(error, UserError):
                status, words, trace = 2, str(error), ""
            else:
                status, words, trace = 1, f"{type(error).__name__}: {error}".splitlines()[0], traceback.format_exc()
                words = f"rank {self.place.rank} failed: {words}{run.hint()}"
            run.errors.append(words)
            self._tell(f"{trace}holotrain: {words}", run)
        self.broken = not self.all_through(seconds)
        if not self.broken:
            self.world.leave()
        self.number += 1
        return status

    def _tell(self, words: str, run: Run) -> None:
        """Prints an error, from one process: the main one, or another whose error the main one does not have."""
        time.sleep(0 if self.place.is_main else GRACE)
        try:
            if self._of_job().add("told", 1) == 1:
                print(words, file=sys.stderr, flush=True)
        except RuntimeError:  # the store is gone, and with it the main process, which hosts it
            if self.place.rank == 1:
                print(f"holotrain: rank 0 died{run.hint()}", file=sys.stderr, flush=True)


def follow(place: Place) -> int:
    """Runs the main process's jobs in another process of the launcher, which prints nothing. Returns the exit status."""
    _silence()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    statuses = [0]
    try:
        jobs = Jobs(place)
    except UserError:
        return 2
    try:
        while not jobs.broken and (job := jobs.world.read("job")) is not None:
            statuses.append(jobs.run(*_received(job)))
    except RuntimeError:  # the main process died between two jobs
        return 1
    if not jobs.broken:
        jobs.all_through(GRACE)
    return max(statuses)


def work(job: dict[str, Any]) -> int:
    """Runs a job in this process, one of several that :func:`launch` started. Returns the exit status."""
    place = found()
    if job["quiet"] or not place.is_main:
        _silence()
    quieten()
    command, config, run = _received(job)
    world, attempt = World(place, connected()), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt and command == "fit":
        if place.is_main:
            recover(run.last_checkpoint)
        # Not from one that was in the folder before, which may be of another run.
        own = world.agreed("own", config.resume or _written(run.last_checkpoint) != job["before"])
        if own and run.last_checkpoint.exists():
            config = replace(config, resume=True, ckpt_path=None)
        if place.is_main:
            origin = run.last_checkpoint if config.resume else "the start"
            again = f"restart {attempt} of {config.trainer.max_restarts}"
            print(f"holotrain: a process failed; {again}, from {origin}", file=sys.stderr)
    status = _member(world, command, config, run)
    world.leave()
    return status


def _member(world: World, command: str, config: RunConfig, run: Run) -> int:
    """Runs a job in this process, one of several. The process group stays, for others may still use its connections."""
    trainer = config.trainer
    device = device_of(trainer, world.place)
    world.join(backend_of(trainer, device), device, trainer.timeout, run.folder)
    set_share(*share_of(trainer, world.place))
    try:
        return _command(command, config, replace(run, world=world))
    finally:
        set_share()


def _command(command: str, config: RunConfig, run: Run) -> int:
    return importlib.import_module(f"holotrain.commands.{command}").run(config, run)


def _posted(command: str, config: RunConfig, run: Run) -> dict[str, Any]:
    shown = {name: value for name, value in vars(run).items() if name != "world"}
    return {"command": command, "config": container(config), "run": shown | {"folder": str(run.folder)}}


def _received(job: dict[str, Any]) -> tuple[str, RunConfig, Run]:
    run = Run(**job["run"] | {"folder": Path(job["run"]["folder"])})
    return job["command"], typed(job["command"], job["config"]), run


def _written(checkpoint: Path) -> list[int] | None:
    """What tells a checkpoint from one that replaces it; None: there is no such file."""
    try:
        found = checkpoint.stat()
    except OSError:
        return None
    return [found.st_ino, found.st_mtime_ns]


def _silence() -> None:
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    warnings.simplefilter("ignore")
    quieten()
