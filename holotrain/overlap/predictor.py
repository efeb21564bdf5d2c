"""Predicts the time of a product whose groups are communicated while it runs, and chooses the fastest groups.

The time of a collective comes from a table of assumed links, or is interpolated between measurements. A GPU computes one output
tile on each of its streaming multiprocessors (SMs) at a time: that is a wave. The recurrence over groups is that of
FlashOverlap.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, pairwise
from typing import Any, TypeVar

import torch

from holotrain.overlap.groups import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Collectives, Columns, Job, Sizes, equal_sizes

TILE_ROWS, TILE_COLUMNS = 128, 128
"""Size of the output tile that one SM computes."""

SMS_LOST = 2
"""SMs that a running collective occupies (FlashOverlap)."""

WAVES_SEARCHED, MOST_GROUPS = 10, 16
"""Up to so many units all groupings are tried; beyond, only up to so many groups of equal size."""


@cache
def sms_of(device: torch.device) -> int | None:
    """The number of SMs; None if the device does not compute in waves."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else None


def slowdown(rows: int, columns: int, sms: int) -> float:
    """The factor by which a collective slows a product down: ``ceil(tiles / (SM - 2)) / ceil(tiles / SM)``."""
    tiles = math.ceil(rows / TILE_ROWS) * math.ceil(columns / TILE_COLUMNS)
    return math.ceil(tiles / (sms - SMS_LOST)) / math.ceil(tiles / sms)


def unit_of(job: Job, sms: int | None) -> int:
    """Rows of the job that are computed in the time of one row: a wave of whole tiles; without SMs a tenth of all rows."""
    if sms is None:
        return math.ceil(job.rows / WAVES_SEARCHED)
    wave = max(sms // math.ceil(job.outputs / TILE_COLUMNS), 1) * TILE_ROWS
    return math.ceil(wave * job.rows / job.product_rows(job.rows))


def makespan(first: Sequence[float], second: Sequence[float], busy: float = 0.0, after: float = 0.0) -> float:
    """Seconds until every group has passed two stages, each of which processes one group at a time.

    FlashOverlap's recurrence: ``C = max(P, C) + t_comm(g[i-1]); P += t_gemm(g[i])``, in all ``max(P, C) + t_comm(last)``.

    Args:
        first: seconds of each group in the first stage (the products if results are reduced, the link if rows are gathered).
        second: seconds of each group in the second stage.
        busy: seconds for which the second stage is busy at the start; the work of ``after`` needs its result.
        after: seconds of further work in the first stage, after the last group.
    """
    ready, done = 0.0, busy
    for one, two in zip(first, second, strict=True):
        ready += one
        done = max(ready, done) + two
    return max(max(ready, busy) + after, done)


def compositions(units: int) -> Iterator[list[int]]:
    """All ways to write ``units`` as an ordered sum of positive numbers: 2^(units - 1)."""
    for count in range(units):
        for cuts in combinations(range(1, units), count):
            yield [end - start for start, end in pairwise((0, *cuts, units))]


def candidates(rows: int, unit: int) -> Iterator[list[int]]:
    """Yields the group sizes to choose from, for this many rows. All sizes but the last are multiples of ``unit``."""
    units = math.ceil(rows / unit)
    equal = (equal_sizes(units, groups) for groups in range(1, min(units, MOST_GROUPS) + 1))
    for sizes in compositions(units) if units <= WAVES_SEARCHED else equal:
        whole = [size * unit for size in sizes]
        whole[-1] -= units * unit - rows
        yield whole


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
    "pcie4": Link(0.7 * 32e9, 20e-6, 2**19),
    "pcie5": Link(0.7 * 64e9, 20e-6, 2**19),
    "infiniband": Link(0.9 * 50e9, 25e-6, 2**19),
    "ethernet100": Link(0.8 * 12.5e9, 60e-6, 2**18),
    "ethernet10": Link(0.8 * 1.25e9, 60e-6, 2**16),
}
"""Assumptions, not measurements: data-sheet bandwidth in one direction times the share of it that collectives usually reach,
and round latencies. NVLink 3 is that of A100, 4 of H100 and H200, 5 of B200. PCIe has 16 lanes, InfiniBand is NDR, Ethernet has
10 or 100 Gbit/s."""


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


T = TypeVar("T")

ALIKE = 0.005
"""Relative difference of predicted times below which the smaller number of groups is chosen."""


def fewest_groups(tried: Iterable[tuple[T, float]], groups: Callable[[Any], int] = len) -> tuple[T, float]:
    """Given candidates and their seconds, returns the one with the fewest groups among those that are about the fastest."""
    tried = list(tried)
    least = min(seconds for _, seconds in tried)
    alike = [way for way in tried if way[1] <= least * (1 + ALIKE)]
    return min(alike, key=lambda way: (groups(way[0]), way[1]))


@dataclass(frozen=True)
class Predictor:
    """Chooses groups from known times. Pass it as ``groups``.

    Args:
        product_seconds: seconds of a job's product over a number of its rows, when nothing else runs.
        link: gives the time of a collective: one of :data:`~holotrain.overlap.predictor.LINKS`, or a measured link.

    The recurrence is FlashOverlap's (:func:`~holotrain.overlap.predictor.makespan`). On a GPU a group that is computed during a
    collective has two SMs less, so its product takes ``ceil(tiles / (SM - 2)) / ceil(tiles / SM)`` times as long.
    """

    product_seconds: Callable[[Job, int], float]
    link: Carrier

    def __call__(self, job: Job, collectives: Collectives | None = None) -> Sizes:
        return self.best(job)[0]

    def best(self, job: Job) -> tuple[Sizes, float]:
        """The fastest group sizes and their predicted seconds."""
        sms = sms_of(job.device)
        tried: list[Sizes] = list(candidates(job.rows, unit_of(job, sms)))
        if job.summed and job.product_rows(job.rows) < job.outputs:
            # Each group reads the other operand again: here the rows are the smaller one, so columns may be the better cut.
            tried += [Columns(sizes) for sizes in candidates(job.outputs, unit_of(job.turned, sms)) if len(sizes) > 1]
        return fewest_groups((sizes, self.seconds(job, sizes)) for sizes in tried)

    def seconds(self, job: Job, sizes: Sizes) -> float:
        """Seconds of the job in groups of these sizes, until the last group has arrived and everything is computed."""
        if isinstance(sizes, Columns):
            return self.seconds(job.turned, sizes.of(job.outputs))
        carried = [self.link.seconds(job.collective, job.message(size), job.ranks) for size in sizes]
        # Nothing travels while the first result is computed, or the last input.
        alone = len(sizes) - 1 if job.arrives else 0
        computed = [self._computed(job, size, beside=number != alone) for number, size in enumerate(sizes)]
        if job.arrives:
            return makespan(carried, computed)
        if not job.covered:
            return makespan(computed, carried)
        again = self.link.seconds(ALL_GATHER, job.message(job.rows), job.ranks) if job.collective == REDUCE_SCATTER else 0.0
        return makespan(computed, carried, busy=again, after=self._computed(job, job.rows, beside=True))

    def _computed(self, job: Job, rows: int, beside: bool) -> float:
        sms, seconds = sms_of(job.device), self.product_seconds(job, rows)
        return seconds * slowdown(job.product_rows(rows), job.outputs, sms) if sms is not None and beside else seconds
