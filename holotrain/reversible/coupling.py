"""Reversible blocks, and how their streams are coupled."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from holotrain.reversible.fused import compile_branch
from holotrain.reversible.grid import Grid

Update = Callable[[str, nn.Module, Tensor, Tensor, dict], Tensor]
"""Runs a branch and updates a stream: (name, branch, target, source, keyword arguments) -> the new target."""


class Coupling:
    """How a block updates its two streams, and how this is undone. This class adds: ``target + branch(source)``.

    A branch reads the source, and what it returns updates the target. The inverse knows the coupled target, the source and what
    the branch returned. If the updates are rounded to a fixed-point grid, it is exact.

    A subclass that couples otherwise keeps shape and dtype, works on a tile of tokens as on all, and raises a ValueError for a
    grid on which its inverse is not exact. What autograd saves of :meth:`couple` stays until the backward.
    """

    def __init__(self, grid: Grid | None = None) -> None:
        self.grid = grid

    def update(self, name: str, branch: Callable, target: Tensor, source: Tensor, keywords: dict) -> Tensor:
        """Runs a branch under plain autograd, which stores every activation, and returns the new target."""
        return self.couple(target, source, branch(source, **keywords))

    def couple(self, target: Tensor, source: Tensor, output: Any) -> Tensor:
        """Returns the new target, of the same shape and dtype: else the inverse could not restore the target."""
        if not isinstance(output, Tensor):
            raise ValueError(f"f and g of a ReversibleBlock must return one tensor, not {type(output).__name__}")
        if output.shape != target.shape:
            raise ValueError(
                f"f and g of a ReversibleBlock must preserve the shape: {tuple(target.shape)} became {tuple(output.shape)}"
            )
        if self.grid is not None and output.dtype.itemsize <= target.dtype.itemsize:
            output = self.grid.round(output.to(target.dtype))
        coupled = target + output
        if coupled.dtype != target.dtype:
            raise ValueError(
                f"adding an update of {output.dtype} would change the stream's dtype, {target.dtype}; "
                f"cast the streams to {coupled.dtype}"
            )
        if self.grid is not None:
            self.grid.watch(coupled)
        return coupled

    def undo(self, coupled: Tensor, source: Tensor, output: Tensor) -> Tensor:
        """Returns the target, up to rounding, or exactly on a grid."""
        if self.grid is not None:
            output = self.grid.round(output.to(coupled.dtype))
        return coupled - output


class ReversibleBlock(nn.Module):
    """Two residual branches coupled so that the block's input can be computed from its output.

    ``y1 = x1 + f(x2)``, ``y2 = x2 + g(y1)``; inverse ``x2 = y2 - g(y1)``, ``x1 = y1 - f(x2)``
    (Gomez et al., "The Reversible Residual Network", 2017, equations 6 and 7).

    Args:
        f, g: any modules that take a tensor and return one of the same shape; in a transformer the pre-norm attention and
            the pre-norm MLP.
        exchange: return the streams swapped, (y2, y1). The next block's f then reads the stream that this block's f updated.

    Attributes:
        coupling: how streams are updated; a class of blocks may set another one.

    Shapes: x1, x2, y1 and y2 have the same shape, with any number of dimensions.

    Raises:
        TypeError: f or g is not a module.
    """

    coupling: type[Coupling] = Coupling

    def __init__(self, f: nn.Module, g: nn.Module, exchange: bool = False) -> None:
        super().__init__()
        for branch in (f, g):
            if not isinstance(branch, nn.Module):
                raise TypeError(f"f and g of a ReversibleBlock must be modules, not a {type(branch).__name__}")
        self.f = f
        self.g = g
        self.exchange = exchange

    def forward(
        self,
        x1: Tensor,
        x2: Tensor,
        f_kwargs: dict | None = None,
        g_kwargs: dict | None = None,
        *,
        update: Update | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Couples the streams.

        Args:
            f_kwargs, g_kwargs: keyword arguments of f and g.
            update: runs each branch; a :class:`ReversibleSequence` sets it. None: plain autograd.
        """
        if update is None:  # not "or": the compiler of torch 2.11 cannot take the truth value of a partial
            update = self.coupling().update
        y1 = update("f", self.f, x1, x2, f_kwargs or {})
        y2 = update("g", self.g, x2, y1, g_kwargs or {})
        return self.placed(y1, y2)

    def compile(self, **options: Any) -> None:
        """Compiles f and g, in place, as ``Module.compile`` does: a block that is compiled as a whole could not be rebuilt."""
        compile_branch(self.f, **options)
        compile_branch(self.g, **options)

    def placed(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Swaps the streams if ``exchange``; its own inverse."""
        return (second, first) if self.exchange else (first, second)

    def inverse(
        self,
        y1: Tensor,
        y2: Tensor,
        f_kwargs: dict | None = None,
        g_kwargs: dict | None = None,
        *,
        grid: Grid | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Computes (x1, x2) from the block's outputs, up to rounding, or exactly on a grid.

        f and g must be deterministic (no dropout).
        """
        coupling = self.coupling(grid)
        y1, y2 = self.placed(y1, y2)
        x2 = coupling.undo(y2, y1, self.g(y1, **(g_kwargs or {})))
        x1 = coupling.undo(y1, x2, self.f(x2, **(f_kwargs or {})))
        return x1, x2


def same_tensor(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are views of the same elements in the same order."""
    same_view = a.shape == b.shape and a.stride() == b.stride() and a.storage_offset() == b.storage_offset()
    return bool(same_view and a.dtype == b.dtype and a.untyped_storage()._cdata == b.untyped_storage()._cdata)
