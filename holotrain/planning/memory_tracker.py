"""MemoryTracker: what is in use at named places of any script, and a warning of a leak."""

from __future__ import annotations

import warnings
from collections import deque
from dataclasses import dataclass
from itertools import pairwise

import torch

from holotrain.numeric import in_words
from holotrain.planning.probes import Probe, probe_of

ROUNDS = 6
"""A leak: in so many snapshots of a name in a row, each is larger than the one before it."""

LEAST_BYTES = {"cuda": 1, "cpu": 2**20}
"""By how much they must grow in total. The allocator of a GPU counts bytes; the process of a CPU also grows by itself."""


@dataclass(frozen=True)
class Snapshot:
    """Bytes ``in_use`` at a place, at the ``peak`` since the snapshot before, and their ``change`` since that snapshot."""

    name: str
    in_use: int
    peak: int
    change: int


class MemoryTracker:
    """Notes the memory in use at named places of a script, such as ``"after forward"``.

    On a CUDA device these are the bytes that PyTorch's allocator has given out, without a wait for the device. Elsewhere it is
    the resident memory of the process: all of it, in pages, so small tensors may not show. Where the system is not Linux, or
    its kernel cannot reset the peak, both figures are the highest resident memory since the process started, and nothing is
    warned of. Each snapshot resets the peak of the device (on Linux of the process), which others, such as
    ``torch.cuda.max_memory_allocated``, then see.

    Warns once for each name if it grows monotonically: each of the last 6 snapshots of the name is larger than the one before
    it, on a CPU by 1 MiB in total. The first snapshot of a name does not count: what is only made in the first round, such as
    optimizer states, is no leak.

    Args:
        device: a device or its name; None: the current GPU if there is one, else the CPU.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._probe = probe_of(self.device)
        self.clear()

    def clear(self) -> None:
        """Forgets all snapshots and warnings, and resets the peak."""
        self._first: dict[str, Snapshot] = {}
        self._recent: dict[str, deque[Snapshot]] = {}  # of each name the last ones, without the first
        self._before: int | None = None
        self._warned: set[str] = set()
        self._probe.reset()

    def snapshot(self, name: str) -> Snapshot:
        """Notes the memory in use here, under a name: the same one in every round of a loop."""
        peak, in_use = self._probe.read()
        made = Snapshot(name, in_use, peak, 0 if self._before is None else in_use - self._before)
        self._before = in_use
        if name in self._first:
            self._recent[name].append(made)
        else:
            self._first[name], self._recent[name] = made, deque(maxlen=ROUNDS)
        growth = self.growth(name)
        if growth is not None and name not in self._warned:
            self._warned.add(name)
            warnings.warn(
                f"memory {name!r} has grown in each of {ROUNDS - 1} rounds, by {in_words(growth)} in all: something keeps "
                "tensors or objects of past rounds, for example a list of losses that are not detached",
                stacklevel=2,
            )
        self._probe.reset()
        return made

    def growth(self, name: str) -> int | None:
        """The bytes by which a name has grown in its last rounds, if it grew in each of them; else None."""
        if type(self._probe) is Probe:  # the highest memory so far never falls
            return None
        levels = [each.in_use for each in self._recent.get(name, ())]
        rises = [after - before for before, after in pairwise(levels)]
        least = LEAST_BYTES.get(self.device.type, LEAST_BYTES["cpu"])
        return sum(rises) if len(levels) == ROUNDS and min(rises) > 0 and sum(rises) >= least else None

    def report(self) -> str:
        """A table of the last round: for each name what is in use, the change since the snapshot before it, the change since
        the first snapshot of the name, and the peak since the snapshot before. Then a line for each name that grows."""
        width = max([len("snapshot"), *map(len, self._first)])
        lines = [
            f"{'snapshot':<{width}}  {'in use':>10}  {'change':>10}  {'since first':>11}  {'peak':>10}  MiB on {self.device}"
        ]
        for name, first in self._first.items():
            last = self._recent[name][-1] if self._recent[name] else first
            mib = [size / 2**20 for size in (last.in_use, last.change, last.in_use - first.in_use, last.peak)]
            lines.append(f"{name:<{width}}  " + "{:10.1f}  {:+10.1f}  {:+11.1f}  {:10.1f}".format(*mib))
        for name in self._first:
            if (growth := self.growth(name)) is not None:
                lines.append(f"{name} grows: {in_words(growth)} in the last {ROUNDS - 1} rounds, in each of them")
        return "\n".join(lines)
