"""How much memory is in use now, and at most since the last reset: of a GPU's allocator, or of this process. Bytes."""

import resource
import sys
from pathlib import Path
from typing import Protocol

import torch


class MemoryProbe(Protocol):
    def reset(self) -> None:
        """The peak starts anew from what is in use now."""

    def peak(self) -> int: ...

    def current(self) -> int: ...

    def reserved(self) -> int | None:
        """What the allocator holds for itself at most; None where there is none."""


class CudaProbe:
    """torch's caching allocator on one GPU. Reading it does not make the host wait for the GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def current(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def reserved(self) -> int:
        return torch.cuda.max_memory_reserved(self.device)


class LinuxProbe:
    """The process's resident memory. The kernel keeps its peak (VmHWM), and starts it anew when asked (proc(5), clear_refs)."""

    status = Path("/proc/self/status")
    clear_refs = Path("/proc/self/clear_refs")

    @classmethod
    def works(cls) -> bool:
        """Whether this kernel lets a process reset its peak."""
        try:
            cls.clear_refs.write_text("5")
        except OSError:
            return False
        return cls.status.is_file()

    def reset(self) -> None:
        self.clear_refs.write_text("5")

    def peak(self) -> int:
        return self._read("VmHWM:")

    def current(self) -> int:
        return self._read("VmRSS:")

    def reserved(self) -> None:
        return None

    def _read(self, figure: str) -> int:
        line = next(line for line in self.status.read_text().splitlines() if line.startswith(figure))
        return int(line.split()[1]) * 1024


class PortableProbe:
    """The process's highest resident memory since it began, where no system call resets it: an upper bound of each peak."""

    def reset(self) -> None:
        """Nothing can be reset here."""

    def peak(self) -> int:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    current = peak

    def reserved(self) -> None:
        return None


def probe_of(device: torch.device) -> MemoryProbe:
    """The probe for training on a device."""
    if device.type == "cuda":
        return CudaProbe(device)
    return LinuxProbe() if LinuxProbe.works() else PortableProbe()
