"""The memory budget of a run."""

import resource
from pathlib import Path

import torch

from holotrain.config.schema import RunConfig
from holotrain.errors import UserError
from holotrain.sizes import in_words, parse_bytes

MEMINFO = Path("/proc/meminfo")
CONTAINER = Path("/sys/fs/cgroup")
"""Memory limit and use of a container (cgroup v2)."""


def budget_of(config: RunConfig, device: str, processes: int = 1) -> int:
    """Bytes: the option ``memory``, else the free memory of the device (on a GPU, including what this process has reserved).

    Args:
        processes: number of processes that train on this machine; on a CPU each gets an equal share.

    Raises:
        UserError: ``memory`` is not set, and the free memory is not known.
    """
    if config.memory is not None:
        return parse_bytes(config.memory)
    if device != "cuda":
        return _of_this_machine() // processes
    if not torch.cuda.is_available():
        raise UserError("memory: this machine has no GPU; give the memory of the GPU, such as memory=16GiB")
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()


def too_little(budget: int, least: int, batch: str) -> UserError:
    """The error if nothing fits."""
    return UserError(f"memory: {in_words(budget)} is too little: with {batch} this run needs {in_words(least, up=True)}")


def _of_this_machine() -> int:
    """The smallest of the free memory of the system, of the container and of this process's limit."""
    if not MEMINFO.is_file():
        raise UserError("memory: the free memory of this system is not known; give it, such as memory=16GiB")
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
