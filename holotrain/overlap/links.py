"""The time of a collective on a link: from a table of assumptions, interpolated between measurements, or emulated."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from holotrain.overlap.groups import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER


@dataclass(frozen=True)
class Link:
    """A link between neighbouring ranks of a ring.

    Args:
        bandwidth: bytes per second of a long message, in one direction.
        latency: seconds of an empty collective.
        ramp: size in bytes of a message that reaches half the bandwidth.
    """

    bandwidth: float
    latency: float
    ramp: float = 0.0

    def speed(self, size: int) -> float:
        """bw(x): bytes per second of a message of ``size`` bytes."""
        return self.bandwidth * size / (size + self.ramp)

    def seconds(self, collective: str, size: int, ranks: int) -> float:
        """``k (ranks - 1) / ranks * x / bw(x)`` plus the latency; k is 2 for an all-reduce, else 1 (FlashOverlap)."""
        if size == 0 or ranks == 1:
            return self.latency
        rounds = 2 if collective == ALL_REDUCE else 1
        return self.latency + rounds * (ranks - 1) / ranks * size / self.speed(size)


LINKS: Mapping[str, Link] = {
    "nvlink3": Link(0.8 * 300e9, 12e-6, 2**20),
    "nvlink4": Link(0.8 * 450e9, 12e-6, 2**20),
    "nvlink5": Link(0.8 * 900e9, 12e-6, 2**20),
    "nvlink": Link(0.8 * 450e9, 12e-6, 2**20),
    "pcie4": Link(0.7 * 32e9, 20e-6, 2**19),
    "pcie5": Link(0.7 * 64e9, 20e-6, 2**19),
    "pcie": Link(0.7 * 64e9, 20e-6, 2**19),
    "infiniband": Link(0.9 * 50e9, 25e-6, 2**19),
    "ethernet100": Link(0.8 * 12.5e9, 60e-6, 2**18),
    "ethernet10": Link(0.8 * 1.25e9, 60e-6, 2**16),
    "ethernet": Link(0.8 * 12.5e9, 60e-6, 2**18),
}
"""Assumptions, not measurements: data-sheet bandwidth in one direction times the share of it that collectives usually reach,
and round latencies. NVLink 3 is that of A100, 4 of H100 and H200, 5 of B200. PCIe has 16 lanes, InfiniBand is NDR, Ethernet has
10 or 100 Gbit/s. A name without a number stands for a current server."""


@dataclass(frozen=True)
class MeasuredLink:
    """Times measured on a process group.

    Args:
        times: seconds by size in bytes, for each collective.
    """

    times: Mapping[str, Mapping[int, float]]

    def seconds(self, collective: str, size: int, ranks: int) -> float:
        return interpolated(self.times[collective], size)


Carrier = Link | MeasuredLink
"""A link, given or measured: it tells the seconds of a collective."""


def interpolated(points: Mapping[int, float], x: float) -> float:
    """Linear interpolation. Before the first point it is constant (latency), after the last proportional (throughput)."""
    sizes = sorted(points)
    if x <= sizes[0]:
        return points[sizes[0]]
    if x >= sizes[-1]:
        return points[sizes[-1]] * x / sizes[-1]
    at = bisect_left(sizes, x)
    low, high = sizes[at - 1], sizes[at]
    return points[low] + (points[high] - points[low]) * (x - low) / (high - low)


SPIN = 2e-4
"""Seconds before the end of a transfer at which waiting changes from sleeping, which ends late, to polling the clock."""


class EmulatedCollectives:
    """Replaces a process group in a single process, which acts as rank 0 of ``ranks``; the other ranks contribute nothing.

    A transfer takes ``link.seconds`` from its launch or from the end of the previous transfer: a link carries one message at a
    time. It uses no core, so computation really overlaps it. CPU only.

    Args:
        link: the time of a collective.
        ranks: the emulated number of ranks.
    """

    def __init__(self, link: Carrier, ranks: int) -> None:
        self.link, self.ranks, self.rank = link, ranks, 0
        self.name = f"emulated_{link}"
        self._free_at = 0.0

    def all_reduce(self, tensor: Tensor) -> Transfer:
        return self._transfer(ALL_REDUCE, tensor.nbytes)

    def reduce_scatter(self, share: Tensor, parts: Tensor) -> Transfer:
        share.copy_(parts[0])
        return self._transfer(REDUCE_SCATTER, parts.nbytes)

    def all_gather(self, parts: Tensor, share: Tensor) -> Transfer:
        parts.copy_(share)  # every part, so that nothing is computed from uninitialised memory
        return self._transfer(ALL_GATHER, parts.nbytes)

    def all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Transfer:
        received[0].copy_(sent[0])
        for part in received[1:]:
            part.zero_()
        return self._transfer(ALL_TO_ALL, sum(part.nbytes for part in sent))

    def agreed(self, value: object) -> object:
        return value

    def largest(self, values: Sequence[float], device: torch.device) -> list[float]:
        return list(values)

    def _transfer(self, collective: str, size: int) -> Transfer:
        begins = max(time.perf_counter(), self._free_at)
        self._free_at = begins + self.link.seconds(collective, size, self.ranks)
        return Transfer(self._free_at)


class Transfer:
    """A message that arrives at time ``ends`` of ``time.perf_counter``."""

    def __init__(self, ends: float) -> None:
        self.ends = ends

    def wait(self) -> None:
        if (left := self.ends - time.perf_counter()) > SPIN:
            time.sleep(left - SPIN)
        while time.perf_counter() < self.ends:
            pass
