"""A training step as one CUDA graph, for small models whose speed is limited by kernel launches."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from holotrain.reversible.random_state import GraphGenerators
from holotrain.reversible.settings import Call

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
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Returns the loss, detached, on the device."""
        if not inputs or not all(tensor.is_cuda for tensor in inputs):
            raise ValueError("a GraphedStep takes tensors on a CUDA device")
        shapes = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in inputs)
        if self._shapes is None:
            self._shapes = shapes
            self._generators = GraphGenerators(inputs[0].device)
        if shapes != self._shapes:
            return self._ordinary(inputs)
        self._calls += 1
        if self._calls < WARM_UPS:
            return self._aside(inputs)
        if self._calls == WARM_UPS:
            with self._generators.available():  # the last ordinary step counts what will be recomputed
                return self._aside(inputs)
        graph = self._graph or self._capture(inputs)
        for static, value in zip(self._inputs, inputs, strict=True):
            static.copy_(value, non_blocking=True)
        graph.replay()
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            parameter.grad = grad
        return self._result.clone()

    def _ordinary(self, inputs: tuple[Tensor, ...]) -> Tensor:
        for parameter in self._parameters:
            parameter.grad = None
        with Call(inputs[0].device).settings.reinstated(cached=False):  # a cast weight in the cache would be captured as it was
            loss = self._loss(*inputs)
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
        with torch.cuda.graph(graph, capture_error_mode="thread_local"), self._generators.available():
            self._result = self._ordinary(tuple(self._inputs))
        self._grads = [parameter.grad for parameter in self._parameters]
        self._graph = graph
        return graph
