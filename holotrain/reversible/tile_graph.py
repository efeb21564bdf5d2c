"""How tiles are cut out of a stream, and put together, in the graph of autograd.

A split and a concatenation of torch hold all parts beside the whole. Here each tile writes its output to its place in the
whole as soon as it has it, and in the backward the gradient of its input. A number stands for what is written so.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function


class Pieces:
    """A stream that is read in tiles, and the one that they write.

    Args:
        x: the stream, (B, T, ...).
    """

    def __init__(self, x: Tensor) -> None:
        self._places, self._outputs = _Places(x.shape), []
        self._source = _Source.apply(x, self._places)

    def read(self, part: Tensor, tile: slice) -> Tensor:
        """A tile of the stream, which is given without its graph."""
        return _Part.apply(self._source, [part], self._places, tile)

    def write(self, output: Tensor, tile: slice) -> None:
        """Takes what a tile returns."""
        self._outputs.append(_Output.apply(output, self._places, tile))

    @property
    def written(self) -> Tensor:
        """What tiles have returned so far."""
        return self._places.output

    def joined(self) -> Tensor:
        """What all tiles have returned."""
        return _Joined.apply(self._places, *self._outputs)


class _Places:
    """What the nodes of one call share. It holds none of them, or they would hold themselves.

    Attributes:
        output, of_input: what tiles write: the output, and in the backward the gradient of the input.
        of_output: what they read in the backward, until none is left.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape, self.left = shape, 0
        self.output: Any = None
        self.of_input: Any = None
        self.of_output: Any = None


class _Source(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, places: _Places) -> Tensor:
        ctx.places = places
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, nothing: Tensor) -> Any:  # ty: ignore[incompatible-method-override]
        gradient, ctx.places.of_input = ctx.places.of_input, None
        return gradient, None


class _Part(Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, part: list[Tensor], places: _Places, tile: slice) -> Tensor:
        ctx.places, ctx.tile = places, tile
        return part[0]  # it is given in a list, so that it is no view of an input of this function

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # ty: ignore[incompatible-method-override]
        if ctx.places.of_input is None:
            ctx.places.of_input = gradient.new_empty(ctx.places.shape)
        ctx.places.of_input[:, ctx.tile] = gradient
        return gradient.new_zeros(()), None, None, None


class _Output(Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, places: _Places, tile: slice) -> Tensor:
        ctx.places, ctx.tile = places, tile
        if places.output is None:
            places.output = output.new_empty(len(output), places.shape[1], *output.shape[2:])
        places.output[:, tile] = output
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, nothing: Tensor) -> Any:  # ty: ignore[incompatible-method-override]
        places, gradient = ctx.places, ctx.places.of_output[:, ctx.tile]
        places.left -= 1
        if places.left == 0:
            places.of_output = None
        return gradient, None, None


class _Joined(Function):
    @staticmethod
    def forward(ctx: Any, places: _Places, *outputs: Tensor) -> Tensor:
        ctx.places, ctx.count = places, len(outputs)
        output, places.output = places.output, None
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # ty: ignore[incompatible-method-override]
        ctx.places.of_output, ctx.places.left = gradient, ctx.count
        return None, *[gradient.new_zeros(())] * ctx.count
