"""Starts a script or a command line as several gloo processes; also the setup and end of such a script."""

import gc
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from forked import COMMAND_LINE, Forked


def found_by_processes(script: Path, folder: Path, count: int = 2) -> dict:
    """Runs ``SCRIPT RANK STORE RESULTS`` in two processes, or ``count``; returns the JSON in RESULTS."""
    environment = os.environ | {"GLOO_PROCESSES": str(count)}
    files = [folder / "store", folder / "found.json"]
    errors = [folder / f"errors_{rank}" for rank in range(count)]
    with ExitStack() as stack:
        ranks = []
        for rank in range(count):
            ranks.append(Forked(script, rank, *files, folder=folder, env=environment, errors=errors[rank]))
            stack.callback(ranks[-1].kill)
        ends, statuses = time.monotonic() + 300, [None] * count
        # Not for each in turn: the others would wait for one that has failed.
        while None in statuses and not any(statuses) and time.monotonic() < ends:
            time.sleep(0.02)
            statuses = [process.poll() for process in ranks]
    assert statuses == [0] * count, "\n".join([f"statuses {statuses}", *(path.read_text() for path in errors)])
    return json.loads((folder / "found.json").read_text())


def free_port(*wanted: int) -> int:
    """A port that is free, among those wanted if any are."""
    for port in wanted or (0,):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return probe.getsockname()[1]
    raise OSError("no port is free")


def by_forks(processes: int, *words: str) -> tuple[int, list[str]]:
    """Starts a command line as torchrun would: its exit status, and what each process says on stderr."""
    shared = os.environ | {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    said = [Path(f"errors_{rank}") for rank in range(processes)]
    with ExitStack() as stack:
        ranks = []
        for rank in range(processes):
            env = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(Forked(COMMAND_LINE, *words, folder=Path.cwd(), env=env, errors=said[rank]))
            stack.callback(ranks[-1].kill)
        statuses = [process.wait(timeout=300) for process in ranks]
    return max(map(abs, statuses)), [path.read_text() for path in said]


def find_as_one_of_them(find: Callable[[int], dict]) -> None:
    """In the script: joins the others, lets ``find`` look, given the rank, and writes down what rank 0 found."""
    rank, store, results = int(sys.argv[1]), *sys.argv[2:]
    count, timeout = int(os.environ["GLOO_PROCESSES"]), timedelta(seconds=60)
    torch.set_num_threads(1)
    shared = dist.FileStore(store, count)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=count, timeout=timeout)
    found = find(rank)
    # A process must not close connections that another one still uses for the last collective.
    shared.set(f"through/{rank}", "")
    shared.wait([f"through/{other}" for other in range(count)], timeout)
    if rank == 0:
        Path(results).write_text(json.dumps(found))
    dist.destroy_process_group()
    gc.collect()  # the group's threads end with its last reference; one that outlives Python aborts the process
