"""Measures the error of a rebuilt input from a small sample."""

from __future__ import annotations

import torch
from torch import Tensor

SAMPLES = 4096
"""Number of entries of each stream that are sampled, approximately."""


class Witness:
    """Stores a sample of the input of consecutive blocks and compares it with the input that the backward rebuilds.

    The entries are evenly spaced, so sampling draws no random numbers. ``drift`` is a 0-dim tensor on the streams' device: the
    norm of the difference relative to the norm of the sample, the larger value of the two streams; None before a backward.
    """

    def __init__(self) -> None:
        self._remembered: tuple[Tensor, Tensor] | None = None
        self.drift: Tensor | None = None

    def remember(self, x1: Tensor, x2: Tensor) -> None:
        """Called in the forward."""
        self._remembered = _sample(x1).clone(), _sample(x2).clone()

    def compare(self, x1: Tensor, x2: Tensor) -> None:
        """Called at the end of the backward."""
        if self._remembered is None:
            return
        drifts = [
            torch.linalg.vector_norm(_sample(rebuilt).double() - true.double()) / _norm(true)
            for rebuilt, true in zip((x1, x2), self._remembered, strict=True)
        ]
        self.drift = torch.stack(drifts).max()
        self._remembered = None


def _sample(stream: Tensor) -> Tensor:
    flat = stream.detach().reshape(-1) if stream.is_contiguous() else stream.detach().flatten()
    return flat[:: max(1, flat.numel() // SAMPLES)]


def _norm(sample: Tensor) -> Tensor:
    return torch.linalg.vector_norm(sample.double()).clamp_min(torch.finfo(torch.float32).tiny)
