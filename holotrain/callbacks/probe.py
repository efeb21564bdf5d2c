"""Current and peak memory in bytes, of a GPU's allocator or of this process."""

import resource
import sys
from pathlib import Path
from typing import Protocol

import torch


class MemoryProbe(Protocol):
    def reset(self) -> None:
        """Resets the peak to the current use."""

    def peak(self) -> int: ...

    def current(self) -> int: ...

    def peak_and_current(self) -> tuple[int, int]: ...

    def reserved(self) -> int | None:
        """Peak of the memory that the allocator reserves; None without such an allocator."""


class CudaProbe:
    """PyTorch's caching allocator on one GPU. Does not synchronize with the GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def current(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def peak_and_current(self) -> tuple[int, int]:
        return self.peak(), self.current()

    def reserved(self) -> int:
        return torch.cuda.max_memory_reserved(self.device)


class LinuxProbe:
    """Resident memory of the process. The kernel keeps its peak (VmHWM) and can reset it (clear_refs, see proc(5))."""

    status = Path("/proc/self/status")
    clear_refs = Path("/proc/self/clear_refs")

    @classmethod
    def works(cls) -> bool:
        """Whether this kernel can reset the peak."""
        try:
            cls.clear_refs.write_text("5")
        except OSError:
            return False
        return cls.status.is_file()

    def reset(self) -> None:
        self.clear_refs.write_text("5")

    def peak(self) -> int:
        return self.peak_and_current()[0]

    def current(self) -> int:
        return self.peak_and_current()[1]

    def peak_and_current(self) -> tuple[int, int]:
        fields = dict(line.split(":", 1) for line in self.status.read_text().splitlines())
        peak, current = (int(fields[name].split()[0]) * 1024 for name in ("VmHWM", "VmRSS"))
        return peak, current

    def reserved(self) -> None:
        return None


class PortableProbe:
    """Peak resident memory since the process started, for systems without a reset. An upper bound of each peak."""

    def reset(self) -> None:
        """Does nothing: this system cannot reset the peak."""

    def peak(self) -> int:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    current = peak

    def peak_and_current(self) -> tuple[int, int]:
        return self.peak(), self.peak()

    def reserved(self) -> None:
        return None


def probe_of(device: torch.device) -> MemoryProbe:
    """The probe for a training device."""
    if device.type == "cuda":
        return CudaProbe(device)
    return LinuxProbe() if LinuxProbe.works() else PortableProbe()
