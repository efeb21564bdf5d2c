"""Starts the other processes of a job on this machine, with Lightning's launcher."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from unittest.mock import patch

import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from torch.distributed import Store, TCPStore

import __main__
from holotrain.errors import UserError
from holotrain.parallel.process_group import PATIENCE

LOOPBACK = "127.0.0.1"


class ProcessDied(Exception):
    """A process was killed by a signal, which may be the system's for lack of memory."""


@contextmanager
def started_processes(command: str, size: int) -> Generator[Store]:
    """Inside, this process is the first of ``size``. The others run ``python -m holotrain COMMAND`` and follow it.

    If the block raises, they are killed. If one of them fails and this process goes on, Lightning kills all after some seconds.

    Raises:
        ProcessDied: the block failed because one of them was killed.
    """
    # torch alone would let the store listen on every address.
    listener = socket.create_server((LOOPBACK, 0))
    port, threads = listener.getsockname()[1], torch.get_num_threads()
    variables = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    # Modules are found as here; without PYTHONSAFEPATH those of the working directory would come first.
    variables |= {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), "PYTHONSAFEPATH": "1"}
    if sys.platform == "linux":
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    # `datasets` (4.4) puts a copy in place of os.environ when it reads in several processes.
    with patch.object(os, "environ", os.environ), patch.dict(os.environ, variables):
        store = TCPStore(LOOPBACK, port, None, True, PATIENCE, False, master_listen_fd=listener.detach())
        launcher = _SubprocessScriptLauncher(LightningEnvironment(), size, 1)
        # The launcher starts again what runs here, which may be a script, a notebook or a sweep.
        program = patch.object(__main__, "__spec__", find_spec("holotrain.__main__"))
        with program, patch.object(sys, "argv", ["holotrain", command]):
            launcher.launch(lambda: None)
        os.environ["RANK"] = "0"
        children = list(launcher.procs)
        try:
            yield store
            launcher.procs.clear()  # Lightning's observer kills this process if it sees that one of them has failed
            with suppress(subprocess.TimeoutExpired):
                for child in children:
                    child.wait(PATIENCE.total_seconds())
        except Exception as error:
            if not isinstance(error, UserError) and (death := _death_among(children)):
                raise ProcessDied(death) from error
            raise
        finally:
            launcher.procs.clear()
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
