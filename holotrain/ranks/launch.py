"""Starts the other processes on this machine.

Lightning's launcher runs the command line again in each process; in a Hydra sweep, this would repeat the whole sweep. The
processes started here receive one configuration after the other from the main process instead.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

from holotrain.errors import UserError
from holotrain.ranks.place import Place
from holotrain.ranks.world import World

LOOPBACK = "127.0.0.1"

OUTER = r"TORCHELASTIC_.*|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_NAME|ROLE_RANK|ROLE_WORLD_SIZE"
"""Environment variables of torchrun."""


def launched(size: int, command: str, timeout: float) -> World:
    """Starts ``size`` - 1 processes on this machine; this process becomes the main one.

    Args:
        command: name of the command, shown in the list of processes.
        timeout: seconds within which processes must answer each other.

    Raises:
        UserError: MASTER_PORT is not valid or in use.
    """
    from torch.distributed import TCPStore

    # Our own socket on the loopback address: the store's would accept commands from every machine.
    listener = _listener(_wanted_port())
    port, handle = listener.getsockname()[1], listener.detach()
    waiting = {"wait_for_workers": False, "master_listen_fd": handle}
    store = TCPStore(LOOPBACK, port, None, True, timedelta(seconds=timeout), **waiting)
    place = Place(0, size, 0, size, LOOPBACK, store.port, hosts=True)
    package = str(Path(__file__).parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    # Variables of a launcher that started this process do not apply to the new ones.
    outer = {name: value for name, value in os.environ.items() if not re.fullmatch(OUTER, name)}
    shared = outer | {"PYTHONPATH": os.pathsep.join(paths)}
    shared.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost store is reported in one line
    if sys.platform == "linux":
        for environment in (os.environ, shared):  # their communication stays on this machine too
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    shared.setdefault("OMP_NUM_THREADS", str(threads_each(size)))
    children: list[subprocess.Popen] = []
    try:
        for rank in range(1, size):
            words = [sys.executable, "-m", "holotrain", command, f"rank={rank}"]
            children.append(subprocess.Popen(words, env=shared | place.environment(rank), stdin=subprocess.DEVNULL))
        return World(place, timeout, store, children)
    except BaseException:  # they would wait forever for the main process
        for child in children:
            child.kill()
        raise


def threads_each(size: int) -> int:
    """Number of threads per process, for ``size`` processes on this machine."""
    return max(1, len(os.sched_getaffinity(0)) // size) if hasattr(os, "sched_getaffinity") else 1


def _wanted_port() -> int:
    """MASTER_PORT, or 0 for any free port."""
    wanted = os.environ.get("MASTER_PORT")
    if not wanted:
        return 0
    if not wanted.isdigit() or int(wanted) > 65535:
        raise UserError(f"MASTER_PORT={wanted} is not a port; give a number from 1 to 65535, or unset it")
    return int(wanted)


def _listener(port: int) -> socket.socket:
    try:
        return socket.create_server((LOOPBACK, port))
    except OSError as error:
        raise UserError(f"MASTER_PORT={port}: the port is in use; unset it or give another") from error
