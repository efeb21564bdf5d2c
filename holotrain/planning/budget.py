"""The free memory of a device of this machine."""

from __future__ import annotations

from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
CONTAINER = Path("/sys/fs/cgroup")
"""Memory limit and use of a container (cgroup v2). The use includes cached files, whose memory is free when it is needed."""


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
    import resource  # not at the top, because Windows has none

    line = next(line for line in MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:"))
    left = [int(line.split()[1]) * 1024]
    most, taken, parts = (CONTAINER / f"memory.{name}" for name in ("max", "current", "stat"))
    if most.is_file() and taken.is_file() and (limit := most.read_text().strip()).isdigit():
        lines = parts.read_text().splitlines() if parts.is_file() else []
        cached = sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))
        left.append(int(limit) - int(taken.read_text()) + cached)
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        left.append(limit - mapped)
    return max(min(left), 0)
