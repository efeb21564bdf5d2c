"""The processes of a launcher: jobs that the main one sends to the others, and the process group of each job."""

from __future__ import annotations

import gc
import json
import os
import traceback
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.elastic.utils.store import barrier
from torch.distributed.rendezvous import rendezvous

from holotrain.errors import UserError
from holotrain.parallel.rank import ProcessRank

FOREVER = timedelta(days=365)
"""For what takes as long as a training, or as the preparation of data. The launcher ends processes that wait in vain."""


class Processes:
    """
    Args:
        process: rank of this process.

    Raises:
        UserError: the main process cannot be reached, or its port is in use.
    """

    def __init__(self, process: ProcessRank) -> None:
        self.process, self._jobs = process, 0
        try:
            self._store = next(rendezvous("env://"))[0]
        except RuntimeError as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise UserError(f"rank {process.rank} cannot meet the others at {where}: {str(error).splitlines()[0]}") from error

    def send_job(self, job: Any) -> None:
        """Sends the next job, as JSON, from the main process to all others."""
        self._start_job()
        self.store.set("job", json.dumps(job))

    def receive_job(self) -> Any:
        """Waits for the next job; None: there is none, and the main process may have ended."""
        self._start_job()
        try:
            self.store.wait(["job"], FOREVER)
            return json.loads(self.store.get("job"))
        except RuntimeError:
            return None

    def close(self) -> None:
        """Releases the other processes, whether or not they received a job, and destroys the process group."""
        with suppress(RuntimeError):
            self.send_job(None)
        destroy_group()

    def _start_job(self) -> None:
        self._jobs += 1
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives a restart
        self.store = dist.PrefixStore(f"holotrain/{attempt}/{self._jobs}", self._store)

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
        self._timeout = timeout
        barrier(self.store, self.process.size, "started")  # starting takes longer than a short timeout
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", self.store),
            rank=self.process.rank,
            world_size=self.process.size,
            timeout=timedelta(seconds=timeout),
            pg_options=options,
            device_id=device if device.type == "cuda" else None,
        )

    @contextmanager
    def shared_mistakes(self) -> Generator[None]:
        """Prints the error of another process than the main one, which it may end.

        Raises:
            UserError: a mistake in this process; or in another one, which led to an error in this one.
        """
        try:
            yield
        except UserError as error:
            text = str(error) if f"rank {self.process.rank}" in str(error) else f"rank {self.process.rank}: {error}"
            with suppress(RuntimeError):  # the store's process may have ended
                self.store.set("mistake", text)
            raise
        except Exception as error:
            with suppress(RuntimeError):
                if self.store.check(["mistake"]):
                    raise UserError(self.store.get("mistake").decode()) from error
                if not self.process.is_main:
                    traceback.print_exc()
            raise

    def leave(self) -> None:
        """Destroys the process group when all processes call this: a connection may still carry another one's last message."""
        with suppress(RuntimeError):  # the main process, which may host the store, has finished
            barrier(self.store, self.process.size, "finished", self._timeout)
        destroy_group()


@contextmanager
def local_rank_zero_first(process: ProcessRank | None) -> Generator[None]:
    """Runs the block in one process per machine, and after that in the others. None: there is one process."""
    if process is None:
        yield
        return
    group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=FOREVER))
    if process.local_rank:
        dist.barrier(group)
    yield
    if not process.local_rank:
        dist.barrier(group)


def destroy_group() -> None:
    """Destroys the process group, if there is one, whatever the other processes do."""
    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()
    # The group's threads end when the last reference is gone; one that outlives Python (torch 2.15) aborts the process.
    gc.collect()
