"""Starts the other processes of a job on this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from unittest.mock import patch

import torch
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from torch.distributed import TCPStore

from holotrain.errors import MachineFailure, UserError

LOOPBACK = "127.0.0.1"

UNNOTICED = 30.0
"""Seconds after which all processes are killed if one has failed and the first one still waits for it, as NCCL may."""


@contextmanager
def started_processes(command: str, size: int, hint: Callable[[], str]) -> Generator[None]:
    """Inside, this process is the first of ``size``. The others run ``python -m holotrain COMMAND`` and follow it.

    If the block raises, they are killed. If one of them fails and this process does not notice, all are killed after a while.

    Args:
        hint: returns what to add to the message about a process that was killed.

    Raises:
        MachineFailure: the block failed because one of them was killed.
    """
    # torch alone would let the store listen on every address.
    listener = socket.create_server((LOOPBACK, 0))
    port, threads = listener.getsockname()[1], torch.get_num_threads()
    variables = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "RANK": "0", "LOCAL_RANK": "0"}
    # As in torchrun's processes, rank 0 does not host the store.
    variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    # Modules are found as here; without PYTHONSAFEPATH those of the working directory would come first.
    variables |= {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), "PYTHONSAFEPATH": "1"}
    if sys.platform == "linux":
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    children: list[subprocess.Popen] = []
    # `datasets` (4.4) puts a copy in place of os.environ when it reads in several processes.
    with patch.object(os, "environ", os.environ), patch.dict(os.environ, variables):
        _store = TCPStore(LOOPBACK, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
        _set_num_threads_if_needed(size)
        for rank in map(str, range(1, size)):
            program = [sys.executable, "-m", "holotrain", command]
            children.append(subprocess.Popen(program, env=os.environ | {"RANK": rank, "LOCAL_RANK": rank}))
        observed = children.copy()
        threading.Thread(target=_end_if_unnoticed, args=[observed], daemon=True).start()
        try:
            yield
            observed.clear()
            with suppress(subprocess.TimeoutExpired):
                for child in children:
                    child.wait(60)
        except UserError:
            raise
        except Exception as error:
            time.sleep(0.5)  # a process's connections are closed before it has ended
            if killed := [child for child in children if (child.poll() or 0) < 0]:
                name = signal.Signals(-killed[0].returncode).name
                rank = children.index(killed[0]) + 1
                raise MachineFailure(f"rank {rank} (process {killed[0].pid}) was killed by {name}{hint()}") from error
            raise
        finally:
            observed.clear()
            for child in children:
                child.kill()
                child.wait()
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
