"""The additive coupling that makes a residual block invertible."""

from collections.abc import Callable

from torch import Tensor, nn

from holotrain.reversible.grid import Grid


def couple(stream: Tensor, update: Tensor, grid: Grid | None = None) -> Tensor:
    """Returns ``stream + update``, which must keep the stream's shape and dtype; with a grid, the update is rounded to it.

    Raises:
        ValueError: the update is not a tensor of the stream's shape, or it would widen the stream's dtype, so that the inverse
            could not restore the stream.
    """
    if not isinstance(update, Tensor):
        raise ValueError(f"f and g of a ReversibleBlock must return one tensor, not {type(update).__name__}")
    if update.shape != stream.shape:
        raise ValueError(
            f"f and g of a ReversibleBlock must preserve the shape: {tuple(stream.shape)} became {tuple(update.shape)}"
        )
    if grid is not None and update.dtype.itemsize <= stream.dtype.itemsize:
        update = grid.round(update.to(stream.dtype))
    coupled = stream + update
    if coupled.dtype != stream.dtype:
        raise ValueError(
            f"adding an update of {update.dtype} would change the stream's dtype, {stream.dtype}; "
            f"cast the streams to {coupled.dtype}"
        )
    if grid is not None:
        grid.watch(coupled)
    return coupled


class ReversibleBlock(nn.Module):
    """Two residual branches coupled so that the block's input can be computed from its output.

    ``y1 = x1 + f(x2)``, ``y2 = x2 + g(y1)``; inverse ``x2 = y2 - g(y1)``, ``x1 = y1 - f(x2)``
    (Gomez et al., "The Reversible Residual Network", 2017, equations 6 and 7).

    Args:
        f, g: any modules that take a tensor and return one of the same shape; in a transformer the pre-norm attention and
            the pre-norm MLP.
        exchange: return the streams swapped, (y2, y1). The next block's f then reads the stream that this block's f updated.

    Shapes: x1, x2, y1 and y2 have the same shape, with any number of dimensions.
    """

    def __init__(self, f: nn.Module, g: nn.Module, exchange: bool = False) -> None:
        super().__init__()
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
        grid: Grid | None = None,
        through: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Couples the streams.

        Args:
            f_kwargs, g_kwargs: keyword arguments of f and g.
            grid: the outputs of f and g are rounded to it; set by :class:`ReversibleSequence`.
            through: runs in place of this method, so that the hooks of the module (FSDP2's, a user's) still run; set by a
                backward schedule.
        """
        if through is not None:
            return through(x1, x2, f_kwargs or {}, g_kwargs or {})
        y1 = couple(x1, self.f(x2, **(f_kwargs or {})), grid)
        y2 = couple(x2, self.g(y1, **(g_kwargs or {})), grid)
        return self.placed(y1, y2)

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
        y1, y2 = self.placed(y1, y2)
        x2 = couple(y2, -self.g(y1, **(g_kwargs or {})), grid)
        x1 = couple(y1, -self.f(x2, **(f_kwargs or {})), grid)
        return x1, x2
