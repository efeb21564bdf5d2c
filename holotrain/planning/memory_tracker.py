"""MemoryTracker: what is in use at named places of any script, and a warning of a leak."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from itertools import pairwise

import torch

from holotrain.numeric import in_words
from holotrain.planning.probes import probe_of

ROUNDS = 6
"""A leak: in so many snapshots of a name in a row, each is larger than the one before it."""

LEAST_BYTES = {"cuda": 1, "cpu": 2**20}
"""By how much they must grow in total. The allocator of a GPU counts bytes; the process of a CPU also grows by itself."""


@dataclass(frozen=True)
class Snapshot:
    """Bytes ``in_use`` at a place, and at the ``peak`` since the snapshot before."""

    name: str
    in_use: int
    peak: int


class MemoryTracker:
    """Notes the memory in use at named places of a script, such as ``"after forward"``.

    On a CUDA device these are the bytes that PyTorch's allocator has given out, without a wait for the device. Elsewhere it is
    the resident memory of the process: all of it, in pages, so small tensors may not show. Each snapshot resets the peak of
    the device (on Linux of the process), which others, such as ``torch.cuda.max_memory_allocated``, then see.

    Warns once for each name if it grows monotonically: each of the last 6 snapshots of the name is larger than the one before
    it, on a CPU by 1 MiB in total. The first snapshot of a name does not count: what is only made in the first round, such as
    optimizer states, is no leak.

    Args:
        device: a device or its name; None: the current GPU if there is one, else the CPU.

    Attributes:
        snapshots: all of them, in order; ``clear()`` the list to begin anew.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.snapshots: list[Snapshot] = []
        self._probe = probe_of(self.device)
        self._warned: set[str] = set()
        self._probe.reset()

    def snapshot(self, name: str) -> Snapshot:
        """Notes the memory in use here, under a name: the same one in every round of a loop."""
        peak, in_use = self._probe.read()
        self.snapshots.append(Snapshot(name, in_use, peak))
        growth = self.growth(name)
        if growth is not None and name not in self._warned:
            self._warned.add(name)
            warnings.warn(
                f"memory {name!r} has grown in each of {ROUNDS - 1} rounds, by {in_words(growth)} in all: something keeps "
                "tensors or objects of past rounds, for example a list of losses that are not detached",
                stacklevel=2,
            )
        self._probe.reset()
        return self.snapshots[-1]

    def growth(self, name: str) -> int | None:
        """The bytes by which a name has grown in its last rounds, if it grew in each of them; else None."""
        levels = [each.in_use for each in self.snapshots if each.name == name][1:][-ROUNDS:]
        rises = [after - before for before, after in pairwise(levels)]
        least = LEAST_BYTES.get(self.device.type, LEAST_BYTES["cpu"])
        return sum(rises) if len(levels) == ROUNDS and min(rises) > 0 and sum(rises) >= least else None

    def report(self) -> str:
        """A table of the last round: for each name what is in use, the change since the snapshot before it, the change since
        the first snapshot of the name, and the peak since the snapshot before. Then a line for each name that grows."""
        first: dict[str, Snapshot] = {}
        last: dict[str, tuple[Snapshot, int]] = {}
        before: Snapshot | None = None
        for each in self.snapshots:
            first.setdefault(each.name, each)
            last[each.name] = each, each.in_use - (before or each).in_use
            before = each
        width = max([len("snapshot"), *map(len, last)])
        lines = [
            f"{'snapshot':<{width}}  {'in use':>10}  {'change':>10}  {'since first':>11}  {'peak':>10}  MiB on {self.device}"
        ]
        for name, (each, change) in last.items():
            mib = each.in_use / 2**20, change / 2**20, (each.in_use - first[name].in_use) / 2**20, each.peak / 2**20
            lines.append(f"{name:<{width}}  " + "{:10.1f}  {:+10.1f}  {:+11.1f}  {:10.1f}".format(*mib))
        for name in last:
            if (growth := self.growth(name)) is not None:
                lines.append(f"{name} grows: {in_words(growth)} in the last {ROUNDS - 1} rounds, in each of them")
        return "\n".join(lines)
