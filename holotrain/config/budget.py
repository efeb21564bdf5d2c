"""How much memory a run may take."""

import resource
from pathlib import Path

import torch

from holotrain.config.schema import RunConfig
from holotrain.errors import UserError
from holotrain.sizes import in_words, parse_bytes

MEMINFO = Path("/proc/meminfo")
CONTAINER = Path("/sys/fs/cgroup")
"""Where Linux says how much a container may take (cgroup v2)."""


def budget_of(config: RunConfig, device: str, processes: int = 1) -> int:
    """Bytes: what ``memory`` says, else what is free on the device (of a GPU, with what this process has of it already).

    Args:
        processes: of this machine that train together; on a CPU each may take its share of what is free.

    Raises:
        UserError: none are named, and what is free cannot be asked.
    """
    if config.memory is not None:
        return parse_bytes(config.memory)
    if device != "cuda":
        return _of_this_machine() // processes
    if not torch.cuda.is_available():
        raise UserError("memory: how much has the GPU? There is none here to ask; give memory=16GiB")
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()


def too_little(budget: int, least: int, batch: str) -> UserError:
    """What to say where nothing fits."""
    return UserError(f"memory: {in_words(budget)} is too little: with {batch} this run needs {in_words(least, up=True)}")


def _of_this_machine() -> int:
    """The least of what the system, a container and this process's own limit leave."""
    if not MEMINFO.is_file():
        raise UserError("memory: this system does not say how much is free; give memory=16GiB")
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
