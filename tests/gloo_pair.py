"""Starts a script or a command line as several gloo processes; also the setup and end of such a script."""

import gc
import json
import os
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from forked import COMMAND_LINE, Forked


def statuses_of(count: int, start: Callable[[int], Forked]) -> list[int]:
    """Exit statuses of processes that ``start`` starts, given the rank of each."""
    with ExitStack() as stack:
        ranks = [start(rank) for rank in range(count)]
        for process in ranks:
            stack.callback(process.kill)
        return [process.wait(timeout=500) for process in ranks]


def found_by_processes(script: Path, folder: Path, count: int = 2) -> dict:
    """Runs ``SCRIPT RANK STORE RESULTS`` in two processes, or ``count``; returns the JSON in RESULTS."""
    env, files = os.environ | {"GLOO_PROCESSES": str(count)}, [folder / "store", folder / "found.json"]
    errors = [folder / f"errors_{rank}" for rank in range(count)]
    statuses = statuses_of(count, lambda rank: Forked(script, rank, *files, folder=folder, env=env, errors=errors[rank]))
    assert statuses == [0] * count, "\n".join([f"statuses {statuses}", *(path.read_text() for path in errors)])
    return json.loads((folder / "found.json").read_text())


def whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """All of a tensor that FSDP2 has sharded; others as they are.

    ``full_tensor()`` once ended a process in a double free, in torch's ``wait_tensor`` with gloo.
    """
    if not hasattr(tensor, "to_local"):
        return tensor
    parts = [torch.empty(0)] * dist.get_world_size()
    dist.all_gather_object(parts, tensor.to_local())
    return torch.cat(parts)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def by_forks(processes: int, *words: str) -> tuple[int, list[str]]:
    """Starts a command line as torchrun would: its exit status, and what each process says on stderr."""
    shared = os.environ | {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    said = [Path(f"errors_{rank}") for rank in range(processes)]

    def start(rank: int) -> Forked:
        env = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        return Forked(COMMAND_LINE, *words, folder=Path.cwd(), env=env, errors=said[rank])

    statuses = statuses_of(processes, start)
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
