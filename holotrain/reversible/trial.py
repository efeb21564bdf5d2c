"""Measures whether overlap is faster. The first backwards of each shape alternate; then the faster schedule is used."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from holotrain.reversible.ambient import is_imagined
from holotrain.reversible.clock import Clock, clock_of
from holotrain.reversible.lanes import AheadLanes, Lanes, StreamLanes, ThreadLanes

WARM_UPS = 1
MEASURED = 5
SETTLED_AFTER = 2 * (WARM_UPS + MEASURED) + 1
"""Number of backwards of one shape after which a trial has ended; the last time is read when the next backward begins."""

_assumed: ContextVar[bool] = ContextVar("overlap assumed", default=False)


class Trial:
    """Compares in turn with overlapped for one shape. It alternates, then chooses the lower median."""

    def __init__(self) -> None:
        self._seconds: dict[bool, list[float]] = {False: [], True: []}
        self._begun = 0
        self._verdict: bool | None = None

    @property
    def settled(self) -> bool:
        return self._verdict is not None

    def overlap(self) -> bool:
        """Whether the next backward overlaps."""
        if self._verdict is not None:
            return self._verdict
        self._begun += 1
        return self._begun % 2 == 0

    def report(self, overlapped: bool, seconds: float) -> None:
        """Records the time of one backward."""
        self._seconds[overlapped].append(seconds)
        measured = [self._seconds[kind][WARM_UPS:] for kind in (False, True)]
        if self._verdict is None and all(len(times) >= MEASURED for times in measured):
            in_turn, beside = (statistics.median(times) for times in measured)
            self._verdict = beside < in_turn


class Overlap:
    """Chooses the lanes of each backward of one sequence from measured times.

    Overlap is tried on CUDA, and on a CPU if operations use one thread and there are more cores. If an operation already uses
    all cores, a second thread only slows it down.
    """

    def __init__(self) -> None:
        self._trials: dict[Hashable, Trial] = {}
        self._timed: list[tuple[Trial, bool, Clock, Any, Any]] = []

    def begin(self, stream: torch.Tensor, movable: bool, work: Hashable = None) -> tuple[Lanes, Callable[[], None] | None]:
        """Returns the lanes of a backward that begins now, and a function to call at its end if it is timed.

        Args:
            stream: one of the two streams.
            movable: whether blocks may be recomputed ahead of time.
            work: identifies the blocks and options, which take different times for the same shape.
        """
        if is_imagined(stream):
            return AheadLanes() if movable and _assumed.get() else Lanes(), None
        if not (movable and may_overlap(stream.device)):
            return Lanes(), None
        cuda = stream.device.type == "cuda"
        if cuda and torch.cuda.is_current_stream_capturing():
            return StreamLanes(stream.device), None  # a graph is replayed without a host: only the arithmetic counts
        self._report()
        trial = self._trials.setdefault((work, stream.shape, stream.dtype, stream.device, torch.get_num_threads()), Trial())
        overlapped = trial.overlap()
        lanes = Lanes() if not overlapped else StreamLanes(stream.device) if cuda else ThreadLanes()
        if trial.settled:
            return lanes, None
        clock = clock_of(stream.device)
        begun = clock.mark()
        return lanes, lambda: self._timed.append((trial, overlapped, clock, begun, clock.mark()))

    def _report(self) -> None:
        """Tells the trials what the clocks can tell by now, without waiting."""
        waiting = []
        for timed in self._timed:
            trial, overlapped, clock, begun, ended = timed
            if (seconds := clock.seconds(begun, ended)) is None:
                waiting.append(timed)
            else:
                trial.report(overlapped, seconds)
        self._timed = waiting

    def __reduce__(self):
        return Overlap, ()  # what was learned belongs to this process and this sequence: copies learn anew


@contextmanager
def assuming_overlap() -> Iterator[None]:
    """Inside the context, backwards on fake tensors overlap if possible."""
    token = _assumed.set(True)
    try:
        yield
    finally:
        _assumed.reset(token)


def may_overlap(device: torch.device) -> bool:
    """Whether overlap is tried on a device."""
    if torch._C._len_torch_dispatch_stack():
        return False  # a FLOP counter or memory tracker must see all operations in order
    if device.type == "cuda":
        return True
    return device.type == "cpu" and torch.get_num_threads() == 1 and _cores() > 1


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
