"""A training step as one CUDA graph, for small models whose speed is limited by kernel launches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor

from holotrain.reversible.context import fake_mode_active, is_captured
from holotrain.reversible.settings import Call, python_states, source_of

WARM_UPS = 3
"""Ordinary steps before the capture, in which libraries allocate workspaces and autograd sets up its streams."""


class GraphedStep:
    """Captures a forward and backward once and replays it. Works with any backward schedule and with dropout.

        step = GraphedStep(lambda images, labels: cross_entropy(model(images), labels), model.parameters())
        loss = step(images, labels)
        optimizer.step()

    Args:
        loss: maps tensors on one CUDA device to a loss (a scalar). It must not wait for the device (no ``.item()``).
        parameters: a step writes their ``.grad``.

    A call overwrites every ``.grad`` with the gradient of this step. So gradients need not be set to zero, and cannot be
    accumulated. The first calls, and calls with other shapes than the first call, run as ordinary steps. Parameters and
    gradients must not move in memory between calls (no ``.to()``).

    Raises:
        ValueError: an input is not on a CUDA device (at the call).
    """

    def __init__(self, loss: Callable[..., Tensor], parameters: Iterable[torch.nn.Parameter]) -> None:
        self._loss = loss
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._shapes: tuple | None = None
        self._calls = 0
        self._draws_on_the_host = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream: torch.cuda.Stream | None = None
        self._found: list[Finding] = []

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Returns the loss, detached, on the device."""
        if not inputs or not all(tensor.is_cuda for tensor in inputs):
            raise ValueError("a GraphedStep takes tensors on a CUDA device")
        shapes = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in inputs)
        if self._shapes is None:
            self._shapes = shapes
            self._generators = GraphGenerators(inputs[0].device)
        if shapes != self._shapes or self._draws_on_the_host:
            return self._ordinary(inputs)
        self._calls += 1
        if self._calls <= WARM_UPS:
            return self._warm_up(inputs)
        graph = self._graph or self._capture(inputs)
        for static, value in zip(self._inputs, inputs, strict=True):
            static.copy_(value, non_blocking=True)
        graph.replay()
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            parameter.grad = grad
        result = self._result.clone()
        if any([finding.report() for finding in self._found]):  # all of them
            # The blocks have other schedules from now on.
            self._graph, self._found, self._calls = None, [], 0
            self._generators = GraphGenerators(inputs[0].device)
        return result

    def _warm_up(self, inputs: tuple[Tensor, ...]) -> Tensor:
        before = _host_states()
        # The last one counts what will be recomputed.
        with self._generators.available() if self._calls == WARM_UPS else nullcontext():
            loss = self._aside(inputs)
        if _host_states() != before:
            self._draws_on_the_host = True
            warnings.warn(
                "the step draws random numbers on the CPU (as for layers that are dropped), which a CUDA graph would repeat in "
                "each replay, so all steps run as ordinary ones",
                stacklevel=3,
            )
        return loss

    def _ordinary(self, inputs: tuple[Tensor, ...]) -> Tensor:
        for parameter in self._parameters:
            parameter.grad = None
        with Call(inputs[0].device).settings.reinstated(cached=False):  # a cast weight in the cache would be captured as it was
            loss = self._loss(*inputs)
        with torch.autocast(inputs[0].device.type, enabled=False):  # the caller's, which is for the forward
            loss.backward()
        return loss.detach()

    def _aside(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """An ordinary step on a stream of its own, as a capture wants it."""
        current = torch.cuda.current_stream(inputs[0].device)
        self._stream = self._stream or torch.cuda.Stream(inputs[0].device)
        aside = self._stream
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            loss = self._ordinary(inputs)
        current.wait_stream(aside)
        return loss

    def _capture(self, inputs: tuple[Tensor, ...]) -> torch.cuda.CUDAGraph:
        self._inputs = [tensor.clone() for tensor in inputs]
        graph = torch.cuda.CUDAGraph()
        self._generators.prepare(graph)
        # A loader's thread may pin memory meanwhile, which would end a capture that forbids it to all threads.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"), self._generators.available(), collected() as found:
            self._result = self._ordinary(tuple(self._inputs))
        self._grads = [parameter.grad for parameter in self._parameters]
        self._graph, self._found = graph, found
        return graph


class Finding(Protocol):
    """What a check computes on the device, in the same memory in each replay."""

    def report(self) -> bool:
        """After a replay: has the figures sent to the host. Returns whether those that have arrived change the schedules."""
        ...


_findings: ContextVar[list[Finding] | None] = ContextVar("findings", default=None)


@contextmanager
def collected() -> Generator[list[Finding]]:
    """Inside, a list of what checks compute."""
    found: list[Finding] = []
    token = _findings.set(found)
    try:
        yield found
    finally:
        _findings.reset(token)


def collect(finding: Finding) -> None:
    """In a capture: has a finding reported after each replay."""
    found = _findings.get()
    if found is not None:
        found.append(finding)


def _host_states() -> tuple[object, bytes]:
    return source_of(torch.default_generator).read()[2], python_states([])


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
