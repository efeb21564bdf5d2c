"""Two clocks: CUDA events, which do not make the host wait, and the host's monotonic clock.

``mark()`` records a time; ``seconds(earlier, later)`` returns the difference, or None if the GPU has not reached ``later`` yet.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    def mark(self) -> Any: ...

    def seconds(self, earlier: Any, later: Any, wait: bool = False) -> float | None: ...


class HostClock:
    """The host's monotonic clock."""

    def mark(self) -> float:
        return time.monotonic()

    def seconds(self, earlier: float, later: float, wait: bool = False) -> float:
        return later - earlier


class CudaClock:
    """CUDA events on the current stream: the time when the GPU reaches them, not the time of the launch."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, earlier: torch.cuda.Event, later: torch.cuda.Event, wait: bool = False) -> float | None:
        if wait:
            later.synchronize()
        if not later.query():
            return None
        return earlier.elapsed_time(later) / 1e3


def waited_seconds(clock: Clock, earlier: Any, later: Any) -> float:
    """The seconds between two marks, after waiting for the later one."""
    seconds = clock.seconds(earlier, later, wait=True)
    assert seconds is not None
    return seconds


def clock_of(device: torch.device) -> Clock:
    """The clock for work on a device."""
    return CudaClock() if device.type == "cuda" else HostClock()
