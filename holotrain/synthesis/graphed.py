"""A computation on fixed memory, captured once as a CUDA graph and replayed without launching its kernels again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

WARM_UPS = 2
"""Ordinary runs before the capture, so that cuFFT has its plans. Its plan cache must not be cleared while the graph exists."""


class Graphed:
    """Replays ``compute(keys)``.

    Args:
        compute: launches work on the device only, and returns tensors by name.
        keys: its argument, copied to the memory that the graph reads.
        at_rest: sets inputs with which ``compute`` changes no lasting state; called before each warm-up run.
    """

    def __init__(self, compute: Callable[[Tensor], dict[str, Tensor]], keys: Tensor, at_rest: Callable[[], None]) -> None:
        self._keys = keys.clone()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(keys.device):
            self._capture(compute, at_rest)

    def _capture(self, compute: Callable[[Tensor], dict[str, Tensor]], at_rest: Callable[[], None]) -> None:
        ambient, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(ambient)
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                at_rest()
                compute(self._keys)
        ambient.wait_stream(aside)
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):  # a loader's thread may pin memory meanwhile
            self._results = compute(self._keys)

    def __call__(self, keys: Tensor) -> dict[str, Tensor]:
        self._keys.copy_(keys)
        with torch.cuda.device(keys.device):
            self._graph.replay()
        return {name: tensor.clone() for name, tensor in self._results.items()}
