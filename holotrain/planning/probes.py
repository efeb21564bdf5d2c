"""Reads the memory in use and its peak: of PyTorch's allocator on a GPU, elsewhere of the process."""

import re
import resource
import sys

import torch


class Probe:
    """Reads memory. Where the peak cannot be reset: the highest resident memory of the process since it started."""

    def reset(self) -> None:
        """Resets the peak to the current use, if it can."""

    def read(self) -> tuple[int, int]:
        """Peak since the reset, and current use."""
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return most, most

    def current(self) -> int:
        return self.read()[1]

    def reserved(self) -> int:
        """Peak of the memory that the allocator reserves; 0 without such an allocator."""
        return 0


class CudaProbe(Probe):
    """PyTorch's caching allocator on one GPU. Does not synchronize with the GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.cuda.init()  # before it, the allocator has no statistics to read or reset

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def read(self) -> tuple[int, int]:
        used = torch.cuda.memory.memory_stats_as_nested_dict(self.device)["allocated_bytes"]["all"]
        return used["peak"], used["current"]

    def reserved(self) -> int:
        return torch.cuda.max_memory_reserved(self.device)


class LinuxProbe(Probe):
    """Resident memory of the process. The kernel keeps its peak (VmHWM) and can reset it (clear_refs, see proc(5))."""

    sizes = re.compile(rb"VmHWM:\s+(\d+).*?VmRSS:\s+(\d+)", re.DOTALL)

    @classmethod
    def works(cls) -> bool:
        """Whether this kernel can reset the peak."""
        try:
            cls().reset()
            return min(cls().read()) > 0
        except (OSError, IndexError):  # other fields than Linux has
            return False

    def reset(self) -> None:
        with open("/proc/self/clear_refs", "wb", buffering=0) as file:
            file.write(b"5")

    def read(self) -> tuple[int, int]:
        with open("/proc/self/status", "rb", buffering=0) as file:
            peak, used = self.sizes.findall(file.read(4096))[0]
        return int(peak) * 1024, int(used) * 1024


def probe_of(device: torch.device) -> Probe:
    """The probe for a device."""
    if device.type == "cuda":
        return CudaProbe(device)
    return LinuxProbe() if LinuxProbe.works() else Probe()
