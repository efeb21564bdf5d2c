"""Forward and backward of training steps as CUDA graphs, for models whose speed is limited by what the host can launch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from holotrain.numeric import counted
from holotrain.reversible.graph_generators import GraphGenerators
from holotrain.reversible.reads import parts_of
from holotrain.reversible.replaced_forward import ReplacedForward
from holotrain.reversible.settings import Call, python_states, source_of

WARM_UPS = 3
"""Ordinary steps before the first capture, in which libraries allocate workspaces and autograd sets up its streams."""

MOST = 8
"""Shapes of batches that are captured."""


class StepGraphs:
    """Captures forward and backward, once for each shape of a batch, and replays them. Works with any schedule and dropout.

        step = StepGraphs(lambda images, labels: cross_entropy(model(images), labels), model)
        for images, labels in loader:
            loss = step(images, labels)
            optimizer.step()
            optimizer.zero_grad()

    A call adds the gradients to ``.grad``, as ``loss.backward()`` does. A shape is captured when it is seen the second time,
    after some ordinary steps. Where parameters or buffers, their ``requires_grad``, a schedule, the mode of a module or its
    ``forward`` have changed, the graphs are dropped. All graphs share one pool of memory.

    Args:
        loss: maps tensors to a loss (a scalar). It must not wait for the device (no ``.item()``).
        model: whose parameters are trained.

    Attributes:
        generators: of blocks that run again; their ``state()`` belongs in a checkpoint.
        reason: why all steps are ordinary ones: a capture failed, or a step waited for the device, or drew random numbers on
            the host. A warning says so once. None: they are captured.
    """

    def __init__(self, loss: Callable[..., Tensor], model: torch.nn.Module) -> None:
        self._loss, self._model = loss, model
        self.reason: str | None = None
        self._graphs: dict[tuple[Any, ...], _Graph] = {}
        self._state: list[object] = []
        self._steps = 0
        self._static: dict[Tensor, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self.generators = GraphGenerators()

    def __call__(self, *inputs: Tensor, scale: float = 1.0) -> Tensor:
        """Returns the loss, detached.

        Args:
            scale: by which its gradients are multiplied, such as the reciprocal of the batches that are accumulated.
        """
        if self.reason is not None or not all(isinstance(x, Tensor) and x.is_cuda for x in inputs):
            return self._ordinary(inputs, scale)
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        shape = (*((x.shape, x.dtype, x.device) for x in inputs), scale, autocast)
        self._drop_if_changed()
        graph = self._graphs.setdefault(shape, _Graph())
        if graph.replay is None and self.captured == MOST:
            return self._ordinary(inputs, scale)
        self._steps += 1
        if graph.replay is None and (self._steps <= WARM_UPS or not graph.seen):
            return self._warm_up(graph, inputs, scale)
        if graph.replay is None and not self._capture(graph, inputs, scale):
            return self._ordinary(inputs, scale)
        return self._replay(graph, inputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> StepGraphs:
        """Without graphs, which cannot be copied."""
        return StepGraphs(copy.deepcopy(self._loss, memo), copy.deepcopy(self._model, memo))

    def __str__(self) -> str:
        """What is captured, or why nothing is."""
        return f"{counted(self.captured, 'shape')}, forward and backward" if self.reason is None else f"eager: {self.reason}"

    @property
    def captured(self) -> int:
        """The number of graphs."""
        return sum(graph.replay is not None for graph in self._graphs.values())

    def _ordinary(self, inputs: tuple[Tensor, ...], scale: float) -> Tensor:
        device = inputs[0].device
        with self.generators.available() if device.type == "cuda" else nullcontext():
            with Call(device).settings.reinstated(cached=False):  # a cast weight in the cache would be captured as it was
                loss = self._loss(*inputs)
            with torch.autocast(device.type, enabled=False):  # the caller's, which is for the forward
                (loss if scale == 1 else loss * scale).backward()
        return loss.detach()

    def _drop_if_changed(self) -> None:
        """Drops the graphs if the model is not what it was."""
        state: list[object] = []
        for part in parts_of(self._model):  # by their dictionaries, since each step asks
            own = vars(part)
            forward = own.get("forward")
            state += own["training"], forward, own.get("schedules"), own.get("keep"), own.get("tile")
            if isinstance(forward, ReplacedForward):
                state += (vars(forward).get(name) for name in ("backward", "tile", "chunk", "heads"))
            for parameter in own["_parameters"].values():
                if parameter is not None:
                    state += parameter.data_ptr(), parameter.requires_grad
            state += (buffer.data_ptr() for buffer in own["_buffers"].values() if buffer is not None)
        if state != self._state:
            self._drop()
            self._state = state

    def _drop(self) -> None:
        self._graphs, self._static, self._steps, self._pool = {}, {}, 0, None

    def _warm_up(self, graph: _Graph, inputs: tuple[Tensor, ...], scale: float) -> Tensor:
        """An ordinary step on a stream of its own, as a capture wants it."""
        before, device = _host_states(), inputs[0].device
        gradients = {each: each.grad for each in self._model.parameters() if each.requires_grad}
        for parameter in gradients:
            parameter.grad = None
        current = torch.cuda.current_stream(device)
        self._stream = aside = self._stream or torch.cuda.Stream(device)
        aside.wait_stream(current)
        with torch.cuda.stream(aside), _waits() as waits:
            loss = self._ordinary(inputs, scale)
        current.wait_stream(aside)
        graph.seen = True
        graph.parameters = [each for each in gradients if each.grad is not None]  # an optimizer passes over others
        for parameter, gradient in gradients.items():
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        if _host_states() != before:
            self._stay_ordinary(
                "it draws random numbers on the CPU, as for layers that are dropped, which a replay would repeat"
            )
        elif waits:
            self._stay_ordinary(f"it waits for the device ({waits[0]})")
        elif self.generators.uneven():
            self._stay_ordinary("a block draws random numbers that its recomputation does not, which a replay would mix up")
        return loss

    def _stay_ordinary(self, reason: str) -> None:
        self.reason = reason
        self._drop()
        warnings.warn(f"the training step is not captured as a CUDA graph: {reason}", stacklevel=4)

    def _capture(self, graph: _Graph, inputs: tuple[Tensor, ...], scale: float) -> bool:
        graph.inputs = [x.clone() for x in inputs]
        self._take_gradients(graph)
        captured = torch.cuda.CUDAGraph()
        self.generators.register(captured)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            # A loader's thread may pin memory meanwhile, which would end a capture that forbids it to all threads.
            with (
                torch.cuda.graph(captured, self._pool, capture_error_mode="thread_local"),
                collected() as graph.found,
            ):
                graph.result = self._ordinary(tuple(graph.inputs), scale)
        except Exception as error:  # of many kinds
            self._stay_ordinary(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            return False
        graph.replay = captured.replay
        return True

    def _take_gradients(self, graph: _Graph) -> None:
        """Has gradients in memory of their own, to which each graph adds: zeros where there were none."""
        new = []
        for parameter in graph.parameters:
            if parameter not in self._static:
                self._static[parameter] = torch.empty_like(parameter) if parameter.grad is None else parameter.grad
            static = self._static[parameter]
            if parameter.grad is None:
                new.append(static)
            elif parameter.grad is not static:
                static.copy_(parameter.grad)
            parameter.grad = static
        if new:
            torch._foreach_zero_(new)

    def _replay(self, graph: _Graph, inputs: tuple[Tensor, ...]) -> Tensor:
        assert graph.replay is not None
        self._take_gradients(graph)
        for static, value in zip(graph.inputs, inputs, strict=True):
            static.copy_(value, non_blocking=True)
        graph.replay()
        result = graph.result.clone()
        if any([finding.report() for finding in graph.found]):  # all of them
            self._drop()  # the blocks have other schedules from now on
        return result


@dataclass
class _Graph:
    """That of one shape."""

    seen: bool = False
    replay: Callable[[], None] | None = None
    parameters: list[torch.nn.Parameter] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    result: Tensor = field(default_factory=lambda: torch.empty(0))
    found: list[Finding] = field(default_factory=list)


@contextmanager
def _waits() -> Generator[list[str]]:
    """Inside, a list of what has waited for the device."""
    before, found = torch.cuda.get_sync_debug_mode(), []
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield found
    finally:
        torch.cuda.set_sync_debug_mode(before)
    for each in caught:
        if "synchronizing CUDA operation" in str(each.message):
            found.append(f"{each.filename}:{each.lineno}")
        else:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


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
