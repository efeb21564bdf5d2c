"""What is in use at named places of any script, and a warning of a leak; the probes that read memory in use and its peak."""

from __future__ import annotations

import re
import resource
import sys
import warnings
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import torch

from holotrain.numeric import in_words

COMPARED = 16
"""Snapshots of a name that a search for a leak compares, in four quarters."""

EVENNESS = 0.5
"""A leak goes on: each quarter adds at least so much of what another one adds. A warm-up fades."""

LEAST_BYTES = {"cuda": 1, "cpu": 2**20}
"""By how much they must grow in total. The allocator of a GPU counts bytes; the process of a CPU also grows by itself."""


@dataclass(frozen=True)
class Snapshot:
    """Bytes ``in_use`` at a place, at the ``peak`` since the snapshot before, and their ``change`` since that snapshot."""

    name: str
    in_use: int
    peak: int
    change: int


@dataclass
class Place:
    """What is known of a name: its first and last snapshot, and bytes in use in each ``stride``-th round after the first."""

    first: Snapshot
    last: Snapshot
    rounds: int = 0
    stride: int = 1
    levels: list[int] = field(default_factory=list)
    leak: str | None = None

    def add(self, snapshot: Snapshot) -> list[int] | None:
        """Adds a round. Returns all levels if there are enough to compare; then every other one is dropped, so that the next
        search looks at twice as many rounds: the slower a leak, the later it is found."""
        self.last, self.rounds = snapshot, self.rounds + 1
        if self.rounds % self.stride == 0:
            self.levels.append(snapshot.in_use)
        if len(self.levels) < COMPARED:
            return None
        levels, self.levels, self.stride = self.levels, self.levels[1::2], 2 * self.stride
        return levels


def steady_growth(levels: list[int]) -> float:
    """The bytes by which levels grow from the first quarter to the last; 0 if not each quarter adds as much as the others, and
    more than levels vary within one.

    Medians see a leak of every second round too, and no single peak.
    """
    size = len(levels) // 4
    quarters = [levels[first : first + size] for first in range(0, 4 * size, size)]
    rises = [after - before for before, after in pairwise(map(median, quarters))]
    varies = median(max(quarter) - min(quarter) for quarter in quarters)
    return sum(rises) if min(rises) > 0 and min(rises) >= max(varies, EVENNESS * max(rises)) else 0


class MemoryTracker:
    """Notes the memory in use at named places of a script, such as ``"after forward"``.

    On a CUDA device these are the bytes that PyTorch's allocator has given out, without a wait for the device. Elsewhere it is
    the resident memory of the process: all of it, in pages, so small tensors may not show. Where the system is not Linux, or
    its kernel cannot reset the peak, both figures are the highest resident memory since the process started, and nothing is
    warned of. Each snapshot resets the peak of the device (on Linux of the process), which others, such as
    ``torch.cuda.max_memory_allocated``, then see.

    Warns once for each name that goes on growing, on a CPU by at least 1 MiB. It looks for a leak after 17 rounds, and each
    time that their number has doubled. The first snapshot of a name does not count: what is only made in the first round, such
    as optimizer states, is no leak.

    Args:
        device: a device or its name; None: the current GPU if there is one, else the CPU.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._probe = probe_of(self.device)
        self.clear()

    def clear(self) -> None:
        """Forgets all snapshots and warnings, and resets the peak."""
        self._places: dict[str, Place] = {}
        self._before: int | None = None
        self._probe.reset()

    def snapshot(self, name: str) -> Snapshot:
        """Notes the memory in use here, under a name: the same one in every round of a loop."""
        peak, in_use = self._probe.read()
        snapshot = Snapshot(name, in_use, peak, 0 if self._before is None else in_use - self._before)
        self._before = in_use
        if name not in self._places:
            self._places[name] = Place(snapshot, snapshot)
        elif (levels := self._places[name].add(snapshot)) is not None:
            self._look_for_a_leak(self._places[name], levels)
        self._probe.reset()
        return snapshot

    def _look_for_a_leak(self, place: Place, levels: list[int]) -> None:
        growth = steady_growth(levels)
        of_the_process = type(self._probe) is Probe  # the highest memory so far, which never falls
        if of_the_process or place.leak or growth < LEAST_BYTES.get(self.device.type, LEAST_BYTES["cpu"]):
            return
        place.leak = f"grows steadily, by {in_words(round(growth))} in {place.rounds} rounds"
        warnings.warn(
            f"memory {place.first.name!r} {place.leak}: something keeps tensors or objects of past rounds, for example a list "
            "of losses that are not detached",
            stacklevel=3,
        )

    def report(self) -> str:
        """A table of the last round: for each name what is in use, the change since the snapshot before it, the change since
        the first snapshot of the name, and the peak since the snapshot before. Then a line for each name that grows."""
        width = max([len("snapshot"), *map(len, self._places)])
        lines = [
            f"{'snapshot':<{width}}  {'in use':>10}  {'change':>10}  {'since first':>11}  {'peak':>10}  MiB on {self.device}"
        ]
        for name, place in self._places.items():
            last = place.last
            mib = [size / 2**20 for size in (last.in_use, last.change, last.in_use - place.first.in_use, last.peak)]
            lines.append(f"{name:<{width}}  " + "{:10.1f}  {:+10.1f}  {:+11.1f}  {:10.1f}".format(*mib))
        lines += [f"{name} {place.leak}" for name, place in self._places.items() if place.leak]
        return "\n".join(lines)


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
