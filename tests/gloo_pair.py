"""Starts a script as two gloo processes and reads what rank 0 found."""

import json
import os
import subprocess
import sys
from pathlib import Path


def found_by_two_processes(script: Path, folder: Path) -> dict:
    """Runs ``python SCRIPT RANK STORE RESULTS`` twice; returns the JSON in RESULTS."""
    root = str(Path(__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    files = [str(folder / "store"), str(folder / "found.json")]
    ranks = [
        subprocess.Popen([sys.executable, str(script), str(rank), *files], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    errors = [process.communicate(timeout=300)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(errors)
    return json.loads((folder / "found.json").read_text())
