"""What models have in common that a pipeline divides between blocks: see :mod:`holotrain.parallel.stages`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from holotrain.models.layers.blocks import Reversible


class Divisible:
    """Base class of models that can be divided between blocks. ``leave(run(part(0, depth), enter(x), x))`` is the model.

    Streams are what one block passes to the next: two tensors in a reversible model, otherwise one.
    """

    blocks: Any

    leave: Callable[..., Tensor]
    """The model's output, from the streams that the last block returns and the arguments of the model after the first."""

    @property
    def depth(self) -> int:
        """The number of blocks."""
        return len(self.blocks.blocks)

    def require_divisible(self) -> None:
        """
        Raises:
            ValueError: the blocks depend on each other beside their streams.
        """
        if getattr(self.blocks, "grid", None) is not None:
            raise ValueError("exact streams have one grid for all blocks; use backward.exact=false")

    def outside(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """The modules that :meth:`enter` and :meth:`leave` use."""
        raise NotImplementedError

    def enter(self, batch: Tensor, /) -> tuple[Tensor, ...]:
        """The streams that the first block reads."""
        raise NotImplementedError

    def stream_shape(self, batch: Tensor, block: int, /) -> tuple[int, ...]:
        """The shape of each stream that a block reads."""
        raise NotImplementedError

    def part(self, start: int, stop: int) -> nn.Module:
        """Some of the blocks, which are shared, for :meth:`run`."""
        return self.blocks.part(start, stop)

    def context_of(self, batch: Tensor, /) -> dict[str, Any]:
        """The keyword arguments of attention."""
        return {}

    def run(self, part: nn.Module, streams: tuple[Tensor, ...], batch: Tensor, /, *others: Tensor | None) -> tuple[Tensor, ...]:
        """The streams that a part of the blocks returns.

        Args:
            others: the arguments of the model after the first; there may be more.
        """
        return as_streams(part(*streams, self.context_of(batch)))

    @property
    def streams(self) -> int:
        """The number of streams between blocks."""
        return 2 if isinstance(self, Reversible) else 1


def as_streams(found: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)
