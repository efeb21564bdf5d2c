"""The processes of a job: messages between them through torch's store, and their process group."""

from __future__ import annotations

import gc
import json
import os
import re
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from holotrain.errors import MachineFailure, UserError
from holotrain.parallel.rank import ProcessRank

PATIENCE = timedelta(seconds=120)
"""How long a process may take to start."""

FOREVER = timedelta(days=365)
"""Some messages take as long as a training; a process that waits for one is ended by the launcher if the sender dies."""


class Processes:
    """
    Args:
        process: place of this process.
        store: a store of this job alone.
    """

    def __init__(self, process: ProcessRank, store: Store) -> None:
        self.process, self.store = process, store

    def post(self, name: str, value: Any) -> None:
        """Publishes a value for all processes, as JSON."""
        self.store.set(name, json.dumps(value))

    def read(self, name: str) -> Any:
        """Waits for the value of a name and returns it."""
        self.store.wait([name], FOREVER)
        return json.loads(self.store.get(name))

    def agreed(self, name: str, value: Any = None) -> Any:
        """The main process's value, in all processes. Plain containers only."""
        if self.process.is_main:
            self.post(name, value)
            return value
        return self.read(name)

    def once_a_machine(self, name: str, act: Callable[[], object]) -> None:
        """Calls ``act`` in one process per machine, and after that in the others.

        Raises:
            UserError: a mistake in the first of them.
            RuntimeError: another error in the first of them.
        """
        name = f"{name}/{self.process.node}"
        if self.process.local_rank == 0:
            try:
                act()
            except Exception as error:
                kind = type(error).__name__  # a mistake is that of all processes of the machine
                self.post(name, [kind, str(error)] if kind in KINDS else told(error, self.process.rank))
                raise
            self.post(name, None)
        elif failed := self.read(name):
            raise KINDS[failed[0]](failed[1])
        else:
            act()

    @contextmanager
    def together(self, name: str) -> Generator[None]:
        """What fails inside in one process fails in all of them, so that none waits for it in vain.

        Raises:
            UserError: a mistake in another process.
            RuntimeError: another error in another process.
        """
        try:
            yield
        except Exception as error:
            self._first_failure(name, told(error, self.process.rank))
            raise
        if failed := self._first_failure(name, None):
            raise KINDS[failed[0]](failed[1])

    def _first_failure(self, name: str, own: list[str] | None) -> list[str] | None:
        """The main process asks all others, unless it has failed itself; each of those asks the main one alone."""
        if not self.process.is_main:
            self.post(f"{name}/of {self.process.rank}", own)
            return own or self.read(name)
        others = (self.read(f"{name}/of {rank}") for rank in range(1, self.process.size))
        failed = own or next(filter(None, others), None)
        self.post(name, failed)
        return failed

    @contextmanager
    def mistakes_told(self) -> Generator[None]:
        """A mistake in one process takes the place of the errors that others have because it is gone.

        Raises:
            UserError: raised inside, here or in another process.
        """
        try:
            yield
        except UserError as mistake:
            self.post("mistake", told(mistake, self.process.rank))
            raise
        except Exception as error:
            if not self._posted("mistake"):
                raise
            kind, words = self.read("mistake")
            raise KINDS[kind](words) from error

    def _posted(self, name: str) -> bool:
        with suppress(RuntimeError):  # the store's process may have ended
            return self.store.check([name])
        return False

    def join(
        self,
        backend: str,
        device: torch.device,
        timeout: float,
        folder: Path,
        options: dist.ProcessGroupNCCL.Options | None = None,
    ) -> None:
        """Creates the process group of torch.distributed.

        Args:
            options: of the backend.
            timeout: seconds after which a collective fails that another process does not join.
            folder: if NCCL's collectives time out, each process writes its last ones to flight_recorder_RANK there.
        """
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        os.environ.setdefault("TORCH_FR_DUMP_ON_TIMEOUT", "1")
        os.environ["TORCH_FR_DUMP_TEMP_FILE"] = os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] = f"{folder}/flight_recorder_"
        self.timeout = timedelta(seconds=timeout)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend,
            store=PrefixStore("group", self.store),
            rank=self.process.rank,
            world_size=self.process.size,
            timeout=self.timeout,
            pg_options=options,
            device_id=device if device.type == "cuda" else None,
        )

    def leave(self) -> None:
        """Destroys the process group, when all processes call this: a connection may still carry another one's last message."""
        self.post(f"through/{self.process.rank}", True)
        with suppress(dist.DistNetworkError):  # the main process, which may host the store, has finished
            self.store.wait([f"through/{rank}" for rank in range(self.process.size)], self.timeout)
        destroy_group()


KINDS = {kind.__name__: kind for kind in (MachineFailure, UserError, RuntimeError)}
"""What processes tell each other of: what the machine did, mistakes, defects."""


def told(error: Exception, rank: int) -> list[str]:
    """The kind of an error and a line that says whose it is, for other processes. A file that a process lacks is a mistake."""
    kind = MachineFailure if isinstance(error, MachineFailure) else UserError
    said = str(error)
    if not isinstance(error, UserError | OSError):
        kind, said = RuntimeError, f"{type(error).__name__}: {error}".splitlines()[0]
    return [kind.__name__, said if re.search(r"\brank \d+", said) else f"rank {rank}: {said}"]


def destroy_group() -> None:
    """Destroys the process group, if there is one, whatever the other processes do."""
    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()
    # The group's threads end when the last reference is gone; one that outlives Python (torch 2.15) aborts the process.
    gc.collect()


def processes_of_jobs(process: ProcessRank) -> Iterator[Processes]:
    """One for each job of the processes that a launcher started; its environment variables say where they meet.

    Raises:
        UserError: the main process cannot be reached, or its port is in use.
    """
    try:
        store = next(rendezvous("env://", timeout=PATIENCE))[0]
    except RuntimeError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise UserError(f"rank {process.rank} cannot meet the others at {where}: {str(error).splitlines()[0]}") from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    for job in count():
        yield Processes(process, PrefixStore(f"holotrain/{attempt}/{job}", store))
