"""Time on a device: marks on it, and the seconds between two of them."""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    """The host's monotonic clock, or CUDA events on the current stream, which do not make the host wait."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_cuda = device, device.type == "cuda"

    def mark(self) -> Any:
        """Records a time: that when the GPU reaches the mark, not that of the launch."""
        if not self._on_cuda:
            return time.perf_counter()
        return torch.cuda.current_stream(self._device).record_event(torch.cuda.Event(enable_timing=True))

    def seconds(self, earlier: Any, later: Any, wait: bool = False) -> float | None:
        """The seconds between two marks; None if the GPU has not reached the later one yet."""
        if not self._on_cuda:
            return later - earlier
        if wait:
            later.synchronize()
        return earlier.elapsed_time(later) / 1e3 if later.query() else None

    def waited_seconds(self, earlier: Any, later: Any) -> float:
        """The seconds between two marks, after waiting for the later one."""
        seconds = self.seconds(earlier, later, wait=True)
        assert seconds is not None
        return seconds
