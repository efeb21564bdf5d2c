"""Random number generators of a captured step: one for each run of a branch, and one for its recomputation."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from holotrain.reversible.context import fake_mode_active, is_captured

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

    def prepare(self, graph: torch.cuda.CUDAGraph, first: int = 0) -> int:
        """Makes as many pairs as were requested since the counting began, and registers them with ``graph``.

        Args:
            first: pairs that were made before, for other graphs, whose seeds are others.

        Returns:
            their number.
        """
        seed = torch.cuda.initial_seed() + first + 1
        self._pairs = [_Pair(self._device, (seed + number) % 2**63) for number in range(self._count)]
        # Later versions of torch register a generator when it is first drawn from, and will remove this method.
        register = getattr(graph, "register_generator_state", lambda generator: None)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*register_generator_state")
            for pair in self._pairs:
                register(pair.forward)
                register(pair.recomputation)
        self._count = 0
        return len(self._pairs)

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
        RuntimeError: a graph is captured by other means than :class:`~holotrain.reversible.graphs.StepGraphs`, or a sequence
            runs inside a branch of another.
    """
    if fake_mode_active():
        return None
    generators = _graph_generators.get()
    pair = None if generators is None else generators.next()
    if pair is None and is_captured(device):
        raise RuntimeError(
            "use holotrain.reversible.graphs.StepGraphs to capture a step that recomputes activations, without a reversible "
            "sequence inside a branch of another; otherwise the recomputation would draw other random numbers"
        )
    return pair
