"""Runs a command in as many processes as its configuration asks for.

Only the main process runs Hydra. It sends the checked configuration of each job to the other processes. So a sweep works with
any number of processes, and all processes of a job share one folder and one configuration.
"""

import importlib
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from holotrain.commands.quiet import quieten
from holotrain.commands.run import Run
from holotrain.commands.screen import console
from holotrain.commands.summary import ended
from holotrain.config.build_strategy import backend_of, check_processes, device_of, processes_of, share_of
from holotrain.config.schema.run import RunConfig
from holotrain.config.typed import container, typed
from holotrain.errors import UserError
from holotrain.models.checkpoint_files import recover
from holotrain.ranks.launch import launched, threads_each
from holotrain.ranks.place import Place
from holotrain.ranks.share import set_share
from holotrain.ranks.watch import GRACE, PATIENCE
from holotrain.ranks.world import Broken, World

TOGETHER = ("fit", "validate", "test")
"""The commands that support several processes."""


class Together:
    """The main process's view of the other processes, over all jobs.

    Args:
        place: rank and size that a launcher (torchrun, srun) gave this process; None: processes are started for each job.

    Attributes:
        broken: a process of the launcher died, so no further job can run.
        unreachable: the processes of the launcher could not connect.
    """

    def __init__(self, place: Place | None) -> None:
        self.place = place
        self._world: World | None = None
        self.broken = False
        self.unreachable = False

    def run(self, command: str, config: RunConfig, run: Run) -> int:
        """Runs one job, in this process or in several. Returns the exit status: 1 if a process died, 2 after a
        UserError in one of them.

        Raises:
            UserError: the processes do not match the configuration.
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
        with self._joined(command, config) as world:
            world.post(f"job/{world.jobs}", _posted(command, config, run))
            try:
                return job(world, command, config, run)
            except Broken as broken:
                print(f"holotrain: {broken}{run.hint()}", file=sys.stderr)
                run.errors.append(str(broken))
                return broken.status
            finally:
                self.broken = self.place is not None and world.watch.verdict is not None

    @contextmanager
    def _joined(self, command: str, config: RunConfig) -> Iterator[World]:
        if self.place is not None:  # the launcher's processes serve all jobs
            if self._world is None:
                self.unreachable = True
                self._world = World(self.place, config.trainer.timeout)
                self.unreachable = False
            self._world.timeout = self._world.watch.timeout = config.trainer.timeout  # this job's
            yield self._world
            return
        size = processes_of(config.trainer)
        threads = torch.get_num_threads()
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(threads_each(size))
        world = launched(size, command, config.trainer.timeout)
        try:
            yield world
        finally:
            world.post(f"job/{world.jobs}", None)
            world.close()
            torch.set_num_threads(threads)

    def close(self) -> None:
        """Releases the launcher's processes, also if they never received a job."""
        if self.place is not None and not self.unreachable:
            world = self._world or World(self.place, PATIENCE)
            world.post(f"job/{world.jobs}", None)
            world.see_off()
            world.close()


def follow(place: Place) -> int:
    """Runs the jobs of the main process and prints nothing. Returns the exit status."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    warnings.simplefilter("ignore")
    quieten()
    statuses, world = [0], None
    try:
        world = World(place, timeout=float("inf"))
        while (posted := world.read(f"job/{world.jobs}")) is not None:
            config = typed(posted["command"], posted["config"])
            run = Run(**posted["run"] | {"folder": Path(posted["run"]["folder"])})
            world.watch.timeout = world.timeout = config.trainer.timeout
            statuses.append(job(world, posted["command"], config, run))
    except (Broken, UserError) as error:
        if place.rank == 1 and str(error).startswith("rank 0 died"):
            print(f"holotrain: {error}{world.watch.hint() if world else ''}", file=sys.stderr)
        return error.status if isinstance(error, Broken) else 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    world.leave()
    return max(statuses)


def job(world: World, command: str, config: RunConfig, run: Run) -> int:
    """Runs one job in this process, one of several. Returns the exit status, the same in all processes.

    Raises:
        Broken: a process died or failed alone.
    """
    run = replace(run, world=world)
    mistake, status, trace = None, 0, ""
    world.watch.hint = run.hint
    try:
        device = device_of(config.trainer, world.place)
        _check_equal(world, device)
        with world.group(backend_of(config.trainer, device), device):
            set_share(*share_of(config.trainer, world.place))
            status = _command(command, config, run)
    except Broken:
        raise
    except UserError as error:
        mistake, status = str(error), 2
        if world.place.is_main:
            print(f"holotrain: {error}", file=sys.stderr)
    except Exception as error:
        verdict = world.watch.verdict or (world.watch.waited(4 * GRACE) if _lost_a_peer(error) else None)
        if verdict is not None:
            raise Broken(verdict) from error
        mistake, status, trace = f"{type(error).__name__}: {error}".splitlines()[0], 1, traceback.format_exc()
        if world.place.is_main:
            print(trace, file=sys.stderr)
    finally:
        set_share()
    if mistake:
        run.errors.append(mistake)
    try:
        return world.finish_job(status, mistake)
    except Broken:
        if mistake and world.place.is_main:  # it has already printed the message
            return status
        if trace:  # no other process has printed it
            print(trace, file=sys.stderr)
        raise


def _lost_a_peer(error: Exception) -> bool:
    """Whether this is the error of a collective that lost a process."""
    signs = r"gloo|nccl|connection (was )?(closed|reset|refused)|broken pipe|peer"
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and bool(re.search(signs, str(error), re.I)))


def _command(command: str, config: RunConfig, run: Run) -> int:
    return importlib.import_module(f"holotrain.commands.{command}").run(config, run)


def _posted(command: str, config: RunConfig, run: Run) -> dict[str, Any]:
    shown = {name: value for name, value in vars(run).items() if name != "world"}
    return {"command": command, "config": container(config), "run": shown | {"folder": str(run.folder)}}


def _check_equal(world: World, device: torch.device) -> None:
    """
    Raises:
        UserError: the machines differ.
    """
    mine = f"{world.place.local_size} processes, on {device.type}"
    for rank, theirs in enumerate(world.gathered("machine", mine)):
        if theirs != mine:
            raise UserError(f"the machines differ: rank {rank} has {theirs}, rank {world.place.rank} has {mine}")
