"""How much memory a run may take."""

import resource
from pathlib import Path

import torch

from holotrain.config.schema import RunConfig
from holotrain.errors import UserError
from holotrain.sizes import parse_bytes


def budget_of(config: RunConfig, device: str) -> int:
    """Bytes: what ``memory`` says, else what is free on the device, with what this process holds there already.

    Raises:
        UserError: none are named, and what is free cannot be asked.
    """
    if config.memory is not None:
        return parse_bytes(config.memory)
    if device != "cuda":
        return _of_this_machine()
    if not torch.cuda.is_available():
        raise UserError("memory: how much has the GPU? There is none here to ask; give memory=16GiB")
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()


def _of_this_machine() -> int:
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        raise UserError("memory: this system does not say how much is free; give memory=16GiB")
    line = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:"))
    free = int(line.split()[1]) * 1024
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return free if limit == resource.RLIM_INFINITY else min(free, limit)
