"""The time of a collective on a link: from a table of assumptions, or interpolated between measurements."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from holotrain.overlap.groups import ALL_REDUCE


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
