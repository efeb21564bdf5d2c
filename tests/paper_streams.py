"""Streams, events, graphs and a thread of a GPU on paper; see paper_gpu.py."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from happens_before import Actor
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from paper_gpu import Machine

CUDA = torch.device("cuda", 0)
_handles = count(1)


class Stream(Actor):
    """Stands for ``torch.cuda.Stream``."""

    def __init__(self, machine: Machine, name: str) -> None:
        super().__init__(name)
        self._machine, self.cuda_stream, self.device = machine, next(_handles), CUDA
        machine.streams.append(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._machine)
        event.clock = dict(self.clock)
        return event

    def wait_event(self, event: Event) -> None:
        self.learn(event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.learn(other.clock)


class Event:
    """Stands for ``torch.cuda.Event``. What is asked for has always just happened."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self.clock = machine, {}

    def synchronize(self) -> None:
        self._machine.require_no_capture()
        self._machine.host.learn(self.clock)

    def query(self) -> bool:
        self.synchronize()
        return True


class Graph:
    """Stands for ``torch.cuda.CUDAGraph``: the operations of a capture."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self.calls = machine, []

    def register_generator_state(self, generator: object) -> None:
        pass

    def replay(self) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
            for function, args, kwargs, made, wanted in self.calls:
                self._machine.wanted = wanted
                self._machine.begin(function, args, kwargs)
                again = function(*args, **kwargs)
                for old, new in zip(tensors_in(made), tensors_in(again), strict=True):
                    if old.untyped_storage()._cdata != new.untyped_storage()._cdata:  # else it is in the same memory
                        old.copy_(new)
                self._machine.end(function, args, kwargs, made)
            self._machine.wanted = None


class Worker:
    """Stands for a ThreadPoolExecutor with one thread, whose work is done as soon as it is submitted, or when it is asked for.

    Args:
        late: when it is asked for.
    """

    def __init__(self, machine: Machine, late: bool) -> None:
        self._machine, self._late, self._thread = machine, late, Actor("the thread")

    def submit(self, work: Callable, *args: object) -> SimpleNamespace:
        begun, machine, done = dict(self._machine.host.clock), self._machine, []

        def run() -> None:
            before = machine.host, machine.current
            machine.host, machine.current = self._thread, machine.streams[0]
            self._thread.learn(begun)
            try:
                done.append(work(*args))
            finally:
                machine.host, machine.current = before

        def result() -> object:
            if not done:
                run()
            machine.host.learn(self._thread.clock)
            return done[0]

        if not self._late:
            run()
        return SimpleNamespace(result=result)


def tensors_in(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
