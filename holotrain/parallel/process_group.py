"""The processes of a job: messages between them through torch's store, and their process group."""

from __future__ import annotations

import gc
import json
import os
import re
import traceback
from collections.abc import Generator, Iterator
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

ERRORS = {kind.__name__: kind for kind in (MachineFailure, UserError, RuntimeError)}


class Processes:
    """
    Args:
        process: rank of this process.
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

    @contextmanager
    def local_rank_zero_first(self, name: str) -> Generator[None]:
        """Runs the block in one process per machine, and after that in the others. These fail if the first one did."""
        name = f"{name}/{self.process.node}"
        if self.process.local_rank:
            _raise(self.read(name))
            yield
            return
        try:
            yield
        except Exception as error:
            self.post(name, self._described(error))
            raise
        self.post(name, None)

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
            self._first_failure(name, self._described(error))
            raise
        _raise(self._first_failure(name, None))

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
    def first_failure_raised(self) -> Generator[None]:
        """The first error of any process takes the place of those that others have because it is gone."""
        try:
            yield
        except Exception as error:
            first = None
            with suppress(RuntimeError):  # the store's process may have ended
                if self.store.check(["failure"]):
                    first = self.read("failure")
                else:
                    self.post("failure", self._described(error))
                    if not isinstance(error, UserError) and not self.process.is_main:
                        traceback.print_exc()
            if first and not isinstance(error, UserError):
                raise ERRORS[first[0]](first[1]) from error
            raise

    def _described(self, error: Exception) -> list[str]:
        """The kind of an error, and a line that names this process. A file that a process lacks is a mistake."""
        kind, text = type(error).__name__, str(error)
        if isinstance(error, OSError):
            kind = "UserError"
        elif not isinstance(error, UserError):
            kind, text = "RuntimeError", f"{kind}: {error}".splitlines()[0]
        return [kind, text if re.search(r"\brank \d+", text) else f"rank {self.process.rank}: {text}"]

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
        self.wait_for_all("begun", PATIENCE)  # starting takes longer than a short timeout
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
        with suppress(dist.DistNetworkError):  # the main process, which may host the store, has finished
            self.wait_for_all("through", self.timeout)
        destroy_group()

    def wait_for_all(self, name: str, timeout: timedelta) -> None:
        self.post(f"{name}/{self.process.rank}", True)
        self.store.wait([f"{name}/{rank}" for rank in range(self.process.size)], timeout)


def _raise(failure: list[str] | None) -> None:
    if failure:
        raise ERRORS[failure[0]](failure[1])


def destroy_group() -> None:
    """Destroys the process group, if there is one, whatever the other processes do."""
    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()
    # The group's threads end when the last reference is gone; one that outlives Python (torch 2.15) aborts the process.
    gc.collect()


def processes_of_jobs(process: ProcessRank, store: Store | None = None) -> Iterator[Processes]:
    """One for each job of the processes that a launcher started.

    Args:
        store: where they meet; None: its environment variables say where.

    Raises:
        UserError: the main process cannot be reached, or its port is in use.
    """
    try:
        store = store or next(rendezvous("env://", timeout=PATIENCE))[0]
    except RuntimeError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise UserError(f"rank {process.rank} cannot meet the others at {where}: {str(error).splitlines()[0]}") from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    for job in count():
        yield Processes(process, PrefixStore(f"holotrain/{attempt}/{job}", store))
