"""Random numbers in a captured CUDA graph: a recomputation repeats the random numbers of its forward in every replay.

During capture the state of a generator cannot be read or set. It can only be replaced by the state of another generator that is
registered with the graph. So each forward that will be recomputed gets two generators with equal seeds: one for the forward and
one for the recomputation. A replay advances both by the same amount, so they stay equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch


class Twins:
    """Counts the pairs that a step needs, then hands them out while it is captured."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pairs: list[TwinState] = []
        self._asked = 0

    def prepare(self, graph: torch.cuda.CUDAGraph) -> None:
        """Makes as many pairs as were asked for since the counting began, and makes them known to ``graph``."""
        seed = torch.cuda.initial_seed()
        for number in range(self._asked):
            pair = TwinState(self._device, (seed + number + 1) % 2**63)
            graph.register_generator_state(pair.forward)
            graph.register_generator_state(pair.recomputation)
            self._pairs.append(pair)
        self._asked = 0

    def next(self) -> TwinState | None:
        """The next pair; None while they are counted."""
        self._asked += 1
        return self._pairs[self._asked - 1] if self._pairs else None

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """Inside, what will be recomputed takes its pair from here."""
        token = _twins.set(self)
        try:
            yield
        finally:
            _twins.reset(token)


_twins: ContextVar[Twins | None] = ContextVar("twins", default=None)


class TwinState:
    """What :class:`~holotrain.reversible.ambient.RandomState` is to ordinary work, for one piece of captured work."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._default = torch.cuda.default_generators[device.index or 0]
        self.forward, self.recomputation = (torch.Generator(device).manual_seed(seed) for _ in range(2))

    def recorded(self):
        """Around the forward."""
        return self._exchanged(self.forward)

    def replayed(self):
        """Around the recomputation."""
        return self._exchanged(self.recomputation)

    def moved(self) -> bool:
        """Nobody can tell in a capture: it is taken to have."""
        return True

    @contextmanager
    def _exchanged(self, generator: torch.Generator) -> Iterator[None]:
        ambient = self._default.graphsafe_get_state()
        self._default.graphsafe_set_state(generator)
        try:
            yield
        finally:
            self._default.graphsafe_set_state(ambient)


def twin_state(device: torch.device) -> TwinState | None:
    """The pair for the piece of work that begins now; None where no graph is captured.

    Raises:
        RuntimeError: a graph is captured by something else than a :class:`~holotrain.reversible.GraphedStep`.
    """
    if device.type != "cuda":
        return None
    twins = _twins.get()
    pair = None if twins is None else twins.next()
    if pair is None and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "use holotrain.reversible.GraphedStep to capture a step that recomputes activations; otherwise the "
            "recomputation would draw other random numbers than the forward"
        )
    return pair
