"""A computation on fixed memory, captured once as a CUDA graph and replayed without launching its kernels again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

WARM_UPS = 2
"""Ordinary runs before the capture, so that cuFFT has its plans. Its plan cache must not be cleared while the graph exists."""


class Graphed:
    """Replays ``compute(*inputs)``.

    Args:
        compute: launches work on the device only. With inputs of zero, as in the warm-up runs, it must change no lasting state.
        inputs: tensors like its arguments, which are copied to the memory that the graph reads.
    """

    def __init__(self, compute: Callable[..., Tensor | None], *inputs: Tensor) -> None:
        self._inputs = [torch.zeros_like(tensor) for tensor in inputs]
        self._device = inputs[0].device
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            ambient, aside = torch.cuda.current_stream(), torch.cuda.Stream()
            aside.wait_stream(ambient)
            with torch.cuda.stream(aside):
                for _ in range(WARM_UPS):
                    compute(*self._inputs)
            ambient.wait_stream(aside)
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):  # a loader's thread may pin memory meanwhile
                self._result = compute(*self._inputs)

    def __call__(self, *inputs: Tensor) -> Tensor | None:
        for held, given in zip(self._inputs, inputs, strict=True):
            held.copy_(given)
        with torch.cuda.device(self._device):
            self._graph.replay()
        return None if self._result is None else self._result.clone()
