"""How tiles are cut out of a stream, and put together, in the graph of autograd.

A split and a concatenation of torch hold all parts beside the whole. Here each tile writes its output to its place in the
whole as soon as it has it, and in the backward the gradient of its input. A number stands for what is written so.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function


class Pieces:
    """What tiles write to their places: the output of the whole, and the gradient of its input.

    Args:
        x: the input, (B, T, ...).
    """

    def __init__(self, x: Tensor) -> None:
        self.shape, self.written, self.gradient = x.shape, None, None
        self._source, self._outputs = _Source.apply(x, self), []

    def read(self, part: Tensor, tile: slice) -> Tensor:
        """A tile of the input, which is given without its graph."""
        return _Part.apply(self._source, [part], self, tile)

    def write(self, output: Tensor, tile: slice) -> None:
        """Takes what a tile returns."""
        self._outputs.append(_Output.apply(output, self, tile))

    def joined(self) -> Tensor:
        """What all tiles have returned."""
        outputs, self._outputs = self._outputs, []
        return _Joined.apply(self, *outputs)


class _Source(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pieces: Pieces) -> Tensor:
        ctx.pieces = pieces
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, nothing: Tensor) -> Any:  # ty: ignore[invalid-method-override]
        gradient, ctx.pieces.gradient = ctx.pieces.gradient, None
        return gradient, None


class _Part(Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, part: list[Tensor], pieces: Pieces, tile: slice) -> Tensor:
        ctx.pieces, ctx.tile = pieces, tile
        return part[0]  # within a list, so that it is no view of an input of this function

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # ty: ignore[invalid-method-override]
        pieces = ctx.pieces
        if pieces.gradient is None:
            pieces.gradient = gradient.new_empty(pieces.shape)
        pieces.gradient[:, ctx.tile] = gradient
        return gradient.new_zeros(()), None, None, None


class _Output(Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, pieces: Pieces, tile: slice) -> Tensor:
        ctx.pieces, ctx.tile = pieces, tile
        if pieces.written is None:
            pieces.written = output.new_empty(len(output), pieces.shape[1], *output.shape[2:])
        pieces.written[:, tile] = output
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, nothing: Tensor) -> Any:  # ty: ignore[invalid-method-override]
        return ctx.pieces.given[:, ctx.tile], None, None


class _Joined(Function):
    @staticmethod
    def forward(ctx: Any, pieces: Pieces, *outputs: Tensor) -> Tensor:
        ctx.pieces, ctx.count = pieces, len(outputs)
        written, pieces.written = pieces.written, None
        return written

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # ty: ignore[invalid-method-override]
        ctx.pieces.given = gradient
        return None, *[gradient.new_zeros(())] * ctx.count
