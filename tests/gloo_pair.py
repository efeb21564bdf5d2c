"""Starts a script as several gloo processes and reads the result of rank 0; also the setup and end of such a script."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def found_by_processes(script: Path, folder: Path, count: int = 2) -> dict:
    """Runs ``python SCRIPT RANK STORE RESULTS`` twice, or ``count`` times; returns the JSON in RESULTS."""
    here = Path(__file__).parent
    paths = [str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "GLOO_PROCESSES": str(count)}
    files = [str(folder / "store"), str(folder / "found.json")]
    ranks = [
        subprocess.Popen([sys.executable, str(script), str(rank), *files], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(count)
    ]
    errors = [process.communicate(timeout=300)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0] * count, "\n".join(errors)
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
