"""The processes of a run: starts them on this machine, sends them jobs, and creates the process group of each job."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from torch.distributed.elastic.utils.store import barrier
from torch.distributed.rendezvous import rendezvous

from holotrain.errors import MachineFailure, UserError
from holotrain.parallel.rank import ProcessRank

LOOPBACK = "127.0.0.1"

UNNOTICED = 30.0
"""Seconds after which all processes are killed if one has failed and the first one still waits for it, as NCCL may."""

FOREVER = timedelta(days=365)
"""For what takes as long as a training, or as the preparation of data. The launcher ends processes that wait in vain."""


class Processes:
    """The processes of a run, which meet in a store of torch.

    Args:
        process: rank of this process.
        store: None: the one that the launcher (torchrun, srun) names in environment variables.
    """

    def __init__(self, process: ProcessRank, store: dist.Store | None = None) -> None:
        self.process, self._jobs = process, 0
        self._store = next(rendezvous("env://"))[0] if store is None else store

    def send_job(self, job: Any) -> None:
        """Sends the next job, as JSON, from the main process to all others; None: there is none."""
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

    def _begin_job(self) -> None:
        self._jobs += 1
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives a restart
        self.store = dist.PrefixStore(f"holotrain/{attempt}/{self._jobs}", self._store)

    def close(self) -> None:
        """Releases the other processes, whether or not they received a job, and destroys the process group."""
        with suppress(RuntimeError):
            self.send_job(None)
        destroy_group()

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


@contextmanager
def started_processes(command: str, size: int, hint: Callable[[], str]) -> Generator[Processes]:
    """Inside, this process is the first of ``size``. The others run ``python -m holotrain COMMAND`` and follow it.

    If the block raises, they are killed. If one of them fails and this process does not notice, all are killed after a while.

    Args:
        hint: returns what to add to the message about a process that was killed.

    Raises:
        MachineFailure: the block failed because one of them was killed.
    """
    # torch alone would let the store listen on every address.
    listener = socket.create_server((LOOPBACK, 0))
    port, threads, children = listener.getsockname()[1], torch.get_num_threads(), []
    variables = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port), "RANK": "0", "LOCAL_RANK": "0"}
    variables |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    # Modules are found as here; without PYTHONSAFEPATH those of the working directory would come first.
    variables |= {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), "PYTHONSAFEPATH": "1"}
    if sys.platform == "linux":
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    # `datasets` (4.4) puts a copy in place of os.environ when it reads in several processes.
    with patch.object(os, "environ", os.environ), patch.dict(os.environ, variables):
        store = dist.TCPStore(LOOPBACK, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
        _set_num_threads_if_needed(size)
        for rank in map(str, range(1, size)):
            program = [sys.executable, "-m", "holotrain", command]
            children.append(subprocess.Popen(program, env=os.environ | {"RANK": rank, "LOCAL_RANK": rank}))
        observed = children.copy()
        threading.Thread(target=_end_if_unnoticed, args=[observed], daemon=True).start()
        processes = Processes(ProcessRank(0, size, 0, size), store)
        try:
            yield processes
            observed.clear()
            processes.close()
            with suppress(subprocess.TimeoutExpired):
                for child in children:
                    child.wait(60)
        except UserError:
            raise
        except Exception as error:
            time.sleep(0.5)  # a process's connections are closed before it has ended
            for rank, child in enumerate(children, 1):
                if (status := child.poll() or 0) < 0:
                    death = f"rank {rank} (process {child.pid}) was killed by {signal.Signals(-status).name}"
                    raise MachineFailure(f"{death}{hint()}") from error
            raise
        finally:
            observed.clear()
            for child in children:
                child.kill()
                child.wait()
            destroy_group()
            torch.set_num_threads(threads)


def _end_if_unnoticed(observed: list[subprocess.Popen]) -> None:
    """Kills this process and the others some time after one of them has failed, unless the list is emptied before."""
    while observed and not any(child.poll() for child in observed):
        time.sleep(1)
    time.sleep(UNNOTICED)
    for child in observed:
        child.kill()
    if observed:
        os.kill(os.getpid(), signal.SIGKILL)
