"""The free memory of a device of this machine."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
CONTAINER = Path("/sys/fs/cgroup")
"""Memory limit and use of a container (cgroup v2)."""


def free_memory(device: str) -> int | None:
    """Bytes; None: not known.

    Args:
        device: ``"cuda"``: includes what this process has reserved; ``"cpu"``: the least of the free memory of the system, of
            the container and of this process's limit.
    """
    if device == "cuda":
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() if torch.cuda.is_available() else None
    if not MEMINFO.is_file():
        return None
    line = next(line for line in MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:"))
    left = [int(line.split()[1]) * 1024]
    most, taken = CONTAINER / "memory.max", CONTAINER / "memory.current"
    if most.is_file() and taken.is_file() and (limit := most.read_text().strip()).isdigit():
        left.append(int(limit) - int(taken.read_text()))
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        left.append(limit - mapped)
    return max(min(left), 0)
