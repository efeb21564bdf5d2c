"""PyTorch's random number generators: their states, read and put back, and how a captured CUDA graph repeats them.

The states of the generators of the CPU and of the device are read after each branch, which takes 2 us. Those of Python and
NumPy are not put back: they are compared, to tell which block draws from them.
"""

from __future__ import annotations

import pickle
import random
import sys
import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from ctypes import c_char
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holotrain.reversible.context import fake_mode_active, is_captured


class Source(NamedTuple):
    """A generator: how its state is read and set."""

    get: Callable[[], Tensor]
    set: Callable[[Tensor], object]

    def read(self) -> State:
        """The source, its state, and the state's first and last bytes, which change when numbers are drawn: the counters, the
        first of 624 words, and a normal number that is left over. They are compared in a tenth of the time of the whole."""
        state = self.get()
        memory = (c_char * state.numel()).from_address(state.data_ptr())
        return self, state, (memory[:64], memory[-64:])


State = tuple[Source, Tensor, object]


def generators_among(values: Iterable[Any]) -> list[torch.Generator]:
    return [value for value in values if isinstance(value, torch.Generator)]


def other_generators_among(values: Iterable[Any]) -> list[Any]:
    """Those of Python and NumPy."""
    return [value for value in values if isinstance(value, random.Random) or type(value).__module__.startswith("numpy.random")]


def other_states(generators: Iterable[Any]) -> bytes:
    """The states of Python's and NumPy's global generators, and of some of theirs, to compare; takes 70 us."""
    numpy = sys.modules.get("numpy")  # torch works without it
    return pickle.dumps([random.getstate(), numpy and numpy.random.get_state(), *generators])


def source_of(generator: torch.Generator) -> Source:
    return Source(generator.get_state, generator.set_state)


_CPU = source_of(torch.default_generator)


def sources_of(device: torch.device) -> list[Source]:
    """The generators for work on a device."""
    if fake_mode_active():  # fake tensors draw nothing, and there may be no device whose state could be read
        return []
    if device.type in ("cpu", "meta") or is_captured(device):
        return [_CPU]
    module = torch.get_device_module(device)
    return [_CPU, Source(partial(module.get_rng_state, device), partial(module.set_rng_state, device=device))]


def put_back(states: list[State]) -> list[State]:
    """Sets the states of some sources and returns those that they had."""
    present = [source.read() for source, _, _ in states]
    for source, state, _ in states:
        source.set(state)
    return present


@contextmanager
def generators_unmoved(device: torch.device, others: Iterable[torch.Generator]) -> Generator[None]:
    """After the context all generators of a device, and others, are as they were before it."""
    states = [source.read() for source in (*sources_of(device), *map(source_of, others))]
    try:
        yield
    finally:
        put_back(states)


# During the capture of a CUDA graph the state of a generator cannot be read or set. It can only be replaced by the state of
# another generator that is registered with the graph. So each run that will be repeated gets two generators with equal seeds.
# A replay of the graph advances both by the same amount, so they stay equal. Those that nothing was drawn from cost it nothing.


class _Pair:
    """Generators for one run of a branch in a captured step, and for its recomputation."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._default = torch.cuda.default_generators[device.index or 0]
        self.forward, self.recomputation = (torch.Generator(device).manual_seed(seed) for _ in range(2))

    @contextmanager
    def used(self, generator: torch.Generator) -> Generator[None]:
        """Inside, the device draws from a generator of the pair."""
        before = self._default.graphsafe_get_state()
        self._default.graphsafe_set_state(generator)
        try:
            yield
        finally:
            self._default.graphsafe_set_state(before)


class GraphGenerators:
    """Counts the pairs that a step needs, then hands them out while it is captured."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._count = device, 0
        self._pairs: list[_Pair] = []

    def prepare(self, graph: torch.cuda.CUDAGraph) -> None:
        """Makes as many pairs as were requested since the counting began, and registers them with ``graph``."""
        seed = torch.cuda.initial_seed()
        self._pairs = [_Pair(self._device, (seed + number + 1) % 2**63) for number in range(self._count)]
        # Later versions of torch register a generator when it is first drawn from, and will remove this method.
        register = getattr(graph, "register_generator_state", lambda generator: None)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*register_generator_state")
            for pair in self._pairs:
                register(pair.forward)
                register(pair.recomputation)
        self._count = 0

    def next(self) -> _Pair | None:
        """The next pair; None while they are counted."""
        self._count += 1
        return self._pairs[self._count - 1] if self._pairs else None

    @contextmanager
    def available(self) -> Generator[None]:
        """Inside, runs of branches take their pairs from here."""
        token = _graph_generators.set(self)
        try:
            yield
        finally:
            _graph_generators.reset(token)


_graph_generators: ContextVar[GraphGenerators | None] = ContextVar("graph generators", default=None)


def next_pair(device: torch.device) -> _Pair | None:
    """The pair for the run that begins now; None where no graph is captured.

    Raises:
        RuntimeError: a graph is captured by other means than :class:`~holotrain.reversible.graphs.GraphedStep`, or a sequence
            runs inside a branch of another.
    """
    if fake_mode_active():
        return None
    generators = _graph_generators.get()
    pair = None if generators is None else generators.next()
    if pair is None and is_captured(device):
        raise RuntimeError(
            "use holotrain.reversible.graphs.GraphedStep to capture a step that recomputes activations, without a reversible "
            "sequence inside a branch of another; otherwise the recomputation would draw other random numbers"
        )
    return pair
