"""Reversible blocks with one stream as input and output, to replace residual blocks."""

import torch
from torch import Tensor

from holotrain.reversible import ReversibleSequence


class AveragedStreams(ReversibleSequence):
    """Reversible blocks with one stream as input and output: both streams start as the input, and their mean is the output.

    The layers around the blocks and the names of all parameters are the same as with a plain ``ResidualSequence``.
    Takes the arguments of :class:`~holotrain.reversible.ReversibleSequence`.
    """

    def forward(self, x: Tensor, f_kwargs: dict | None = None, g_kwargs: dict | None = None) -> Tensor:
        return self.join(super().forward(*self.split(x), f_kwargs, g_kwargs))

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The streams that the first block reads."""
        return x, x

    def join(self, streams: tuple[Tensor, Tensor]) -> Tensor:
        """What is returned for the streams of the last block."""
        y1, y2 = streams
        return (y1 + y2) / 2


class ConcatenatedStreams(AveragedStreams):
    """The same, but both streams are its output, one after the other: (..., C) -> (..., 2C)."""

    def join(self, streams: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat(streams, dim=-1)
