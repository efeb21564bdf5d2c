"""Where recomputations run while gradients are computed: in turn, on a second CUDA stream, or on a second thread.

A schedule starts the recomputation of a half before it needs the result. The lanes decide what happens then:

- in turn: nothing, until the result is requested;
- streams: halves with f run on a side stream, halves with g on the current stream. Autograd runs a backward operation on the
  stream of its forward operation. So the next half is recomputed on one stream while gradients are computed on the other;
- thread: a worker recomputes while the calling thread computes gradients.

On CUDA only the GPU waits, on events; the host does not synchronize. Tensors are shared between the streams without
``record_stream``: the side stream waits for the current one before f is recomputed, the current stream waits for the side
stream at the end of a block, and the last reference to a tensor is dropped only after these waits. So the memory pool of each
stream holds the graph of one half at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Protocol

import torch

from holotrain.reversible.half import Half, Rebuilt

Recompute = Callable[[], Rebuilt]


class Started(Protocol):
    """A recomputation that was started."""

    def result(self) -> Rebuilt: ...


class Lanes:
    """In turn: the sequential schedule, and the base class of the others."""

    overlapped = False

    def start_g(self, half: Half, recompute: Recompute) -> Started:
        return _InTurn(recompute)

    def start_f(self, half: Half, recompute: Recompute) -> Started:
        return _InTurn(recompute)

    def mark(self) -> Any:
        """Marks the current point of the current stream."""

    def differentiating_f(self, mark: Any) -> AbstractContextManager:
        """The context in which gradients of f are computed, after ``mark``; after it the results can be used."""
        return nullcontext()


class _InTurn:
    def __init__(self, recompute: Recompute) -> None:
        self._recompute = recompute

    def result(self) -> Rebuilt:
        return self._recompute()


class AheadLanes(Lanes):
    """Recomputes as early as the others would, but in the calling thread. A plan of memory uses it."""

    overlapped = True

    def start_g(self, half: Half, recompute: Recompute) -> Started:
        return _Done(recompute())

    start_f = start_g


class _Done:
    def __init__(self, rebuilt: Rebuilt) -> None:
        self._rebuilt = rebuilt

    def result(self) -> Rebuilt:
        return self._rebuilt


class ThreadLanes(Lanes):
    """A worker thread recomputes. Halves that use shared state (generators, buffers, parameter hooks) run in turn."""

    overlapped = True

    def start_g(self, half: Half, recompute: Recompute) -> Started:
        if half.draws or half.buffers is not None or half.hooked:
            return _InTurn(recompute)
        return _worker(os.getpid()).submit(recompute)

    start_f = start_g


@cache
def _worker(process: int) -> ThreadPoolExecutor:
    """One thread per process; a forked process starts its own."""
    return ThreadPoolExecutor(1, thread_name_prefix="holotrain-recompute")


class StreamLanes(Lanes):
    """Halves with f run on a side stream, halves with g on the current stream."""

    overlapped = True

    def __init__(self, device: torch.device) -> None:
        self._ambient = torch.cuda.current_stream(device)
        self._side = _side_stream(device, self._ambient.cuda_stream)

    def start_g(self, half: Half, recompute: Recompute) -> Started:
        return _early(half, recompute, self._ambient, self._ambient)

    def start_f(self, half: Half, recompute: Recompute) -> Started:
        self._side.wait_stream(self._ambient)  # for what g's half rebuilt, and for the gradients of the block behind
        return _early(half, recompute, self._side, self._ambient)

    def mark(self) -> torch.cuda.Event:
        return self._ambient.record_event()

    @contextmanager
    def differentiating_f(self, mark: torch.cuda.Event):
        self._side.wait_event(mark)
        with torch.cuda.stream(self._side):
            yield
        self._ambient.wait_stream(self._side)


def _early(half: Half, recompute: Recompute, stream: torch.cuda.Stream, ambient: torch.cuda.Stream) -> Started:
    try:
        with torch.cuda.stream(stream):
            rebuilt = recompute()
    except torch.OutOfMemoryError:
        if half.call.kept is not None:
            raise  # what was kept can be taken once
        return _InTurn(recompute)  # there was no room for two halves at once: put off until the first is gone
    return _OnStream(rebuilt, stream.record_event(), ambient)


class _OnStream:
    def __init__(self, rebuilt: Rebuilt, done: torch.cuda.Event, ambient: torch.cuda.Stream) -> None:
        self._rebuilt, self._done, self._ambient = rebuilt, done, ambient

    def result(self) -> Rebuilt:
        self._ambient.wait_event(self._done)
        return self._rebuilt


@cache
def _side_stream(device: torch.device, ambient: int) -> torch.cuda.Stream:
    """One for every ambient stream, so that a sequence within a branch of another has a side of its own."""
    return torch.cuda.Stream(device)
