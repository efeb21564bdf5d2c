"""Starts the other processes of a job on this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from unittest.mock import patch

import torch
from lightning.fabric.strategies.launchers.subprocess_script import _launch_process_observer
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from torch.distributed import TCPStore

from holotrain.errors import MachineFailure, UserError

LOOPBACK = "127.0.0.1"


@contextmanager
def started_processes(command: str, size: int, hint: Callable[[], str]) -> Generator[None]:
    """Inside, this process is the first of ``size``. The others run ``python -m holotrain COMMAND`` and follow it.

    If the block raises, they are killed. If one of them fails and this process does not notice, Lightning kills all after some
    seconds: NCCL may wait for a dead process.

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
    observed: list[subprocess.Popen] = []
    # `datasets` (4.4) puts a copy in place of os.environ when it reads in several processes.
    with patch.object(os, "environ", os.environ), patch.dict(os.environ, variables):
        _store = TCPStore(LOOPBACK, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
        _set_num_threads_if_needed(size)
        try:
            for rank in map(str, range(1, size)):
                program = [sys.executable, "-m", "holotrain", command]
                children.append(subprocess.Popen(program, env=os.environ | {"RANK": rank, "LOCAL_RANK": rank}))
            observed += children
            _launch_process_observer(observed)
            yield
            observed.clear()
            with suppress(subprocess.TimeoutExpired):
                for child in children:
                    child.wait(60)
        except Exception as error:
            if not isinstance(error, UserError) and (death := _death_among(children)):
                raise MachineFailure(f"{death}{hint()}") from error
            raise
        finally:
            observed.clear()  # Lightning's observer kills this process if it sees that one of them has failed
            for child in children:
                child.kill()
                child.wait()
            torch.set_num_threads(threads)


def _death_among(children: list[subprocess.Popen]) -> str | None:
    time.sleep(0.5)  # its connections are closed before it has ended
    for rank, child in enumerate(children, 1):
        if (status := child.poll()) is not None and status < 0:
            return f"rank {rank} (process {child.pid}) was killed by {signal.Signals(-status).name}"
    return None
