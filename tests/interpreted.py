"""Kernels of Triton without a GPU: in its interpreter, which must be chosen before Triton is imported, and compiled for one."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run_interpreted(script: Path, argument: object, timeout: float) -> None:
    """Fails with what the script says if it fails."""
    paths = os.pathsep.join([*map(str, Path(__file__).parents[:2]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    command = [sys.executable, str(script), str(argument)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert run.returncode == 0, run.stderr


def code_for(
    capability: int, kernel: Any, kinds: dict[str, str], constants: dict[str, Any], aligned: Collection[str], **options: Any
) -> str:
    """The PTX that Triton makes of a kernel for a GPU of a compute capability, such as 90.

    Args:
        kinds: of the parameters that are no constants, such as ``*bf16`` and ``i32``.
        aligned: parameters that are multiples of 16.
        options: how many warps, for example.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    signature = {name: "constexpr" if name in constants else kinds[name] for name in kernel.arg_names}
    places = [place for place, name in enumerate(kernel.arg_names) if name in aligned]
    source = ASTSource(kernel, signature, constants, {(place,): [["tt.divisibility", 16]] for place in places})
    made = compile(source, GPUTarget("cuda", capability, 32), options).asm["ptx"]
    assert f".target sm_{capability}" in made
    return made
