"""Starts a script as two gloo processes and reads what rank 0 found; and what such a script does at either end."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def found_by_two_processes(script: Path, folder: Path) -> dict:
    """Runs ``python SCRIPT RANK STORE RESULTS`` twice; returns the JSON in RESULTS."""
    here = Path(__file__).parent
    paths = [str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    files = [str(folder / "store"), str(folder / "found.json")]
    ranks = [
        subprocess.Popen([sys.executable, str(script), str(rank), *files], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    errors = [process.communicate(timeout=300)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(errors)
    return json.loads((folder / "found.json").read_text())


def find_as_one_of_two(find: Callable[[int], dict]) -> None:
    """In the script: joins the other process, lets ``find`` look, given the rank, and writes down what rank 0 found."""
    rank, store, results = int(sys.argv[1]), *sys.argv[2:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    found = find(rank)
    if rank == 0:
        Path(results).write_text(json.dumps(found))
    dist.destroy_process_group()
