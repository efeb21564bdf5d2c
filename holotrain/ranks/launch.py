"""Starting the other processes of this machine.

Lightning's own launcher starts the command line once more in each of them; within a sweep of Hydra's that would be the whole
sweep. Here they are started as followers, which take one configuration after the other from the main process.
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
"""The variables by which torchrun describes itself."""


def launched(size: int, command: str, timeout: float) -> World:
    """This process as the main one of ``size`` on this machine; the others are started.

    Args:
        command: of the command line, for whoever looks at the list of processes.
        timeout: seconds within which processes answer each other.

    Raises:
        UserError: the port that MASTER_PORT names is in use.
    """
    from torch.distributed import TCPStore

    # A socket of our own: the store's would listen to every machine, and whoever reaches it can tell processes what to do.
    listener = _listener(_wanted_port())
    port, handle = listener.getsockname()[1], listener.detach()
    waiting = {"wait_for_workers": False, "master_listen_fd": handle}
    store = TCPStore(LOOPBACK, port, None, True, timedelta(seconds=timeout), **waiting)
    place = Place(0, size, 0, size, LOOPBACK, store.port, hosts=True)
    package = str(Path(__file__).parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    # Where a launcher started this one process, what it says of its own is not true of ours.
    outer = {name: value for name, value in os.environ.items() if not re.fullmatch(OUTER, name)}
    shared = outer | {"PYTHONPATH": os.pathsep.join(paths)}
    shared.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a store that is gone is told of in a line
    if sys.platform == "linux":
        for environment in (os.environ, shared):  # what they say to each other stays on this machine too
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    shared.setdefault("OMP_NUM_THREADS", str(threads_each(size)))
    children: list[subprocess.Popen] = []
    try:
        for rank in range(1, size):
            words = [sys.executable, "-m", "holotrain", command, f"rank={rank}"]
            children.append(subprocess.Popen(words, env=shared | place.environment(rank), stdin=subprocess.DEVNULL))
        return World(place, timeout, store, children)
    except BaseException:  # they would wait for a main process that never comes
        for child in children:
            child.kill()
        raise


def threads_each(size: int) -> int:
    """Threads for each of so many processes that share this machine's cores."""
    return max(1, len(os.sched_getaffinity(0)) // size) if hasattr(os, "sched_getaffinity") else 1


def _wanted_port() -> int:
    """That of MASTER_PORT, else 0: any that is free."""
    wanted = os.environ.get("MASTER_PORT")
    if not wanted:
        return 0
    if not wanted.isdigit() or int(wanted) > 65535:
        raise UserError(f"MASTER_PORT={wanted} is no port")
    return int(wanted)


def _listener(port: int) -> socket.socket:
    try:
        return socket.create_server((LOOPBACK, port))
    except OSError as error:
        raise UserError(f"MASTER_PORT={port}: the port is in use; unset it, or give another") from error
