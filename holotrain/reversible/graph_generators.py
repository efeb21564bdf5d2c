"""Random number generators of steps that are captured: one for each run of a branch, and one for its recomputation."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch
from torch import Tensor

from holotrain.reversible.context import fake_mode_active, is_captured

# During the capture of a CUDA graph the state of a generator cannot be read or set. It can only be replaced by the state of
# another generator that is registered with the graph. So each run that will be repeated gets two generators with equal states.
# A replay of the graph advances both by the same amount, so they stay equal. Those that nothing was drawn from cost it nothing.
# All steps take them, captured or not: what is drawn does not depend on when a graph is captured, as after a resume.


class _Pair:
    """Generators for one run of a branch, and for its recomputation."""

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

    def restore(self, state: Tensor) -> None:
        self.forward.set_state(state)
        self.recomputation.set_state(state)


def used(pair: _Pair | None, again: bool) -> AbstractContextManager:
    """The context of a run, or, ``again``, of its recomputation."""
    return nullcontext() if pair is None else pair.used(pair.recomputation if again else pair.forward)


class GraphGenerators:
    """The pairs of a model's steps: the first is that of the first run of a branch in each step, and so on."""

    def __init__(self) -> None:
        self._pairs: list[_Pair] = []
        self._restored: list[Tensor] = []
        self._next = 0

    def register(self, graph: torch.cuda.CUDAGraph) -> None:
        """Before a capture of what has run before."""
        # Later versions of torch register a generator when it is first drawn from, and will remove this method.
        register = getattr(graph, "register_generator_state", lambda generator: None)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*register_generator_state")
            for pair in self._pairs:
                register(pair.forward)
                register(pair.recomputation)

    def next(self, device: torch.device) -> _Pair | None:
        """The next pair of a step; None: a step that is captured has more runs than any before it."""
        number = self._next
        self._next += 1
        if number == len(self._pairs):
            if is_captured(device):
                return None
            pair = _Pair(device, (torch.cuda.initial_seed() + number + 1) % 2**63)
            if number < len(self._restored):
                pair.restore(self._restored[number])
            self._pairs.append(pair)
        return self._pairs[number]

    @contextmanager
    def available(self) -> Generator[None]:
        """Inside, runs of branches take the pairs of a step."""
        self._next = 0
        if not torch.cuda.is_current_stream_capturing():
            for pair in self._pairs:  # a recomputation that stopped early has drawn less
                pair.recomputation.set_state(pair.forward.get_state())
        token = _graph_generators.set(self)
        try:
            yield
        finally:
            _graph_generators.reset(token)

    def uneven(self) -> bool:
        """After a step: whether a recomputation has drawn less than its run, as where it stops before the last draw."""
        return any(not torch.equal(pair.forward.get_state(), pair.recomputation.get_state()) for pair in self._pairs)

    def state(self) -> list[Tensor]:
        """For a checkpoint."""
        return [pair.forward.get_state() for pair in self._pairs] + self._restored[len(self._pairs) :]

    def restore(self, state: list[Tensor]) -> None:
        self._restored = state
        for pair, kept in zip(self._pairs, state, strict=False):
            pair.restore(kept)


_graph_generators: ContextVar[GraphGenerators | None] = ContextVar("graph generators", default=None)


def next_pair(device: torch.device) -> _Pair | None:
    """The pair for the run that begins now; None where no step is to be captured.

    Raises:
        RuntimeError: a graph is captured by other means than :class:`~holotrain.reversible.graphs.StepGraphs`, or a sequence
            runs inside a branch of another.
    """
    if fake_mode_active():
        return None
    generators = _graph_generators.get()
    pair = None if generators is None else generators.next(device)
    if pair is None and is_captured(device):
        raise RuntimeError(
            "use holotrain.reversible.graphs.StepGraphs to capture a step that recomputes activations, without a reversible "
            "sequence inside a branch of another; otherwise the recomputation would draw other random numbers"
        )
    return pair
