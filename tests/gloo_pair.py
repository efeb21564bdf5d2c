"""Starts a script as several gloo processes and reads the result of rank 0; also the setup and end of such a script."""

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from forked import Forked


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
