"""The processes of a run: jobs that the main one sends to the others, and the process group of each job."""

from __future__ import annotations

import gc
import json
import os
import traceback
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.utils.store import barrier
from torch.distributed.rendezvous import rendezvous

from holotrain.errors import UserError
from holotrain.parallel.rank import ProcessRank

FOREVER = timedelta(days=365)
"""For what takes as long as a training, or as the preparation of data. The launcher ends processes that wait in vain."""


class Processes:
    """The processes that a launcher started. They meet in torch's store.

    Args:
        process: rank of this process.
    """

    def __init__(self, process: ProcessRank) -> None:
        self.process, self._jobs = process, 0
        self._store = next(rendezvous("env://"))[0]

    def send_job(self, job: Any) -> None:
        """Sends the next job, as JSON, from the main process to all others."""
        self._begin_job()
        self.store.set("job", json.dumps(job))

    def receive_job(self) -> Any:
        """Waits for the next job; None: there is none, and the main process may have ended."""
        self._begin_job()
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

    def _begin_job(self) -> None:
        self._jobs += 1
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives a restart
        self.store = dist.PrefixStore(f"holotrain/{attempt}/{self._jobs}", self._store)

    @contextmanager
    def group(self, **options: Any) -> Generator[None]:
        """Inside, there is torch's process group. After an error it stays, so that the other processes only wait.

        Args:
            options: those of ``init_process_group``.

        Raises:
            UserError: a mistake in this process; or in another one, which led to an error in this one.
        """
        rank, size = self.process.rank, self.process.size
        barrier(self.store, size, "started")  # starting takes longer than a short timeout
        dist.init_process_group(store=dist.PrefixStore("group", self.store), rank=rank, world_size=size, **options)
        try:
            yield
        except UserError as error:
            with suppress(RuntimeError):  # the store's process may have ended
                self.store.set("mistake", str(error) if f"rank {rank}" in str(error) else f"rank {rank}: {error}")
            raise
        except Exception as error:
            with suppress(RuntimeError):
                if self.store.check(["mistake"]):
                    raise UserError(self.store.get("mistake").decode()) from error
                if rank:  # the main process may end this one before it can print
                    traceback.print_exc()
            raise
        with suppress(RuntimeError):
            barrier(self.store, size, "finished")  # a connection may still carry another process's last message
        destroy_group()


def destroy_group() -> None:
    """Destroys the process group, if there is one, whatever the other processes do."""
    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()
    # The group's threads end when the last reference is gone; one that outlives Python (torch 2.15) aborts the process.
    gc.collect()
