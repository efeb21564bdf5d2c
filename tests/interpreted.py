"""Runs a script in Triton's interpreter, which must be chosen before Triton is imported."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run_interpreted(script: Path, argument: object, timeout: float) -> None:
    """Fails with what the script says if it fails."""
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    command = [sys.executable, str(script), str(argument)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert run.returncode == 0, run.stderr
