"""The processes of a run: starts them, sends them the jobs of a sweep, and makes the process group of each job."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from torch.distributed.elastic.utils.store import barrier
from torch.distributed.rendezvous import rendezvous

from holotrain.errors import UserError
from holotrain.parallel.rank import ProcessRank

FOREVER = timedelta(days=365)
"""For what takes as long as a training, or as the preparation of data. The launcher ends processes that wait in vain."""

GRACE = 3.0
"""Seconds that a process lives on after an error. If another one has caused it, the launcher ends it before it says so."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def run_processes(words: list[str], size: int) -> int:
    """Runs ``python -m holotrain WORDS`` in ``size`` processes of this machine, with torchrun's variables. (When one fails,
    Lightning's launcher kills its own process, and torchrun reports more than the line of a mistake.)

    SIGINT, SIGTERM, SIGHUP and SIGUSR1 go to all of them, and then all end by themselves. Otherwise the first that fails
    ends all.

    Returns:
        the exit status of the first that failed; else 0.

    Raises:
        UserError: a process was killed by a signal that did not come from here.
    """
    cores = os.cpu_count() or 1
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_network_port())}
    shared |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    shared["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(max(1, cores // size)))
    # Modules are found as here; without PYTHONSAFEPATH those of the working directory would come first.
    shared |= {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), "PYTHONSAFEPATH": "1"}
    if sys.platform == "linux":
        shared["GLOO_SOCKET_IFNAME"] = "lo"
    children: list[subprocess.Popen] = []
    received: list[int] = []

    def forward(signum: int, frame: Any) -> None:
        received.append(signum)
        for child in children:
            child.send_signal(signum)

    handlers = {signum: signal.getsignal(signum) for signum in SIGNALS}
    try:
        for signum, handler in handlers.items():
            if handler != signal.SIG_IGN:  # as nohup wants it
                signal.signal(signum, forward)
        for rank in map(str, range(size)):
            environment = os.environ | shared | {"RANK": rank, "LOCAL_RANK": rank}
            # In a session of its own it gets a terminal's Ctrl-C from here, once.
            program = [sys.executable, "-m", "holotrain", *words]
            children.append(subprocess.Popen(program, env=environment, start_new_session=True))
        statuses: list[int | None] = [None]
        while None in statuses and (received or not any(statuses)):
            time.sleep(0.1)
            statuses = [child.poll() for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    rank, status = next(((rank, status) for rank, status in enumerate(statuses) if status), (0, 0))
    if status >= 0:
        return status
    if -status in received:
        return 128 - status
    raise UserError(f"rank {rank} (process {children[rank].pid}) was killed by {signal.Signals(-status).name}")


class Processes:
    """The processes that a launcher has started, which meet in its store. The main one runs Hydra and sends each job to the
    others."""

    def __init__(self, process: ProcessRank) -> None:
        self.process, self._jobs = process, 0
        self._meeting = next(rendezvous("env://"))[0]

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
        self.store = dist.PrefixStore(f"holotrain/{attempt}/{self._jobs}", self._meeting)

    def close(self) -> None:
        """Releases the other processes, whether or not they received a job, and destroys the process group."""
        with suppress(RuntimeError):
            self.send_job(None)
        destroy_group()

    @contextmanager
    def group(self, **options: Any) -> Generator[None]:
        """Inside, there is torch's process group, and the GPU ``device_id`` is the current one. After an error the group stays,
        so that the other processes only wait.

        Args:
            options: those of ``init_process_group``.

        Raises:
            UserError: a mistake in this process; or in another one, which led to an error in this one.
        """
        rank, size = self.process.rank, self.process.size
        if options["device_id"] is not None:
            torch.cuda.set_device(options["device_id"])
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
                if rank:  # the launcher may end this one, after the main process, before it can print
                    traceback.print_exc()
            if not rank:
                time.sleep(GRACE)
            raise
        with suppress(RuntimeError):
            barrier(self.store, size, "finished")  # a connection may still carry another process's last message
        destroy_group()


def group_options(trainer: Any, process: ProcessRank, kind: str) -> dict[str, Any]:
    """Arguments of ``torch.distributed.init_process_group``, from the options of the group ``trainer``, on devices of
    a kind. With ``cuda``, NCCL is told its device."""
    backend = trainer.backend if trainer.backend != "auto" else "nccl" if kind == "cuda" else "gloo"
    timeout = timedelta(seconds=trainer.timeout)
    options = None
    if trainer.nccl_max_ctas is not None or trainer.nccl_high_priority:
        # The groups of a device mesh are split from the group of all processes and take these options over.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=trainer.nccl_high_priority)
        options._timeout = timeout  # torch warns of another one than that of the group
        if trainer.nccl_max_ctas is not None:
            options.config.min_ctas, options.config.max_ctas = 1, trainer.nccl_max_ctas
    device = torch.device("cuda", process.local_rank) if kind == "cuda" else None
    return {"backend": backend, "timeout": timeout, "pg_options": options, "device_id": device}


def destroy_group() -> None:
    """Destroys the process group, if there is one, whatever the other processes do."""
    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()
    # The group's threads end when the last reference is gone; one that outlives Python (torch 2.15) aborts the process.
    gc.collect()
