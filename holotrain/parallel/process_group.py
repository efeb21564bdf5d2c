"""The processes of a job: messages between them through torch's store, and their process group."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from holotrain.errors import UserError
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
            UserError: ``act`` raised it on this machine.
        """
        name = f"{name}/{self.process.node}"
        if self.process.local_rank == 0:
            try:
                act()
            except UserError as mistake:
                self.post(name, str(mistake))
                raise
            self.post(name, None)
        elif (mistake := self.read(name)) is not None:
            raise UserError(mistake)
        else:
            act()

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
