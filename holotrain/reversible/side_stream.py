"""A second CUDA stream, on which work runs beside that of the main one."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch
from torch import Tensor

from holotrain.reversible.context import has_no_data


class SideStream:
    """A second CUDA stream, on which recomputations and copies run ahead. On the host nothing waits.

    The two streams share tensors without ``record_stream``. The host lets go of what one stream reads only after the other has
    waited for it, so that the memory can be used again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def run(self, work: Callable[[], object]) -> torch.cuda.Event:
        """Runs the work after all that was begun so far; returns what to wait for."""
        main = torch.cuda.current_stream(self._device)
        side = _side_stream(self._device, main.cuda_stream)
        side.wait_stream(main)
        try:
            with torch.cuda.stream(side):
                work()
        except BaseException:
            main.wait_stream(side)  # for what it had begun
            raise
        return side.record_event()

    def wait(self, done: torch.cuda.Event) -> None:
        """Makes all work that is submitted from now on wait."""
        torch.cuda.current_stream(self._device).wait_event(done)


@cache
def _side_stream(device: torch.device, main: int) -> torch.cuda.Stream:
    """One for every main stream, so that a sequence within a branch of another has a side of its own."""
    return torch.cuda.Stream(device)


class SameStream:
    """Takes its place where nothing has values."""

    def run(self, work: Callable[[], object]) -> None:
        work()

    def wait(self, done: None) -> None: ...


_assumed_side: ContextVar[bool] = ContextVar("side stream assumed", default=False)


@contextmanager
def assuming_a_side_stream() -> Generator[None]:
    """Inside, tensors without values are recomputed as early as a CUDA device would, so that a memory plan counts them."""
    token = _assumed_side.set(True)
    try:
        yield
    finally:
        _assumed_side.reset(token)


def side_of(stream: Tensor) -> SideStream | SameStream | None:
    """Where the recomputation of a stream's branches may run ahead; None: nowhere, since a CPU has no second queue of work."""
    if has_no_data(stream):
        return SameStream() if _assumed_side.get() else None
    return SideStream(stream.device) if stream.is_cuda else None
