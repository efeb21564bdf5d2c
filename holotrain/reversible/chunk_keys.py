"""Keys and values of a sequence that is taken in chunks, and their gradients.

They are on the device, each layer's in one tensor, or in main memory, each chunk's by itself. (Chunks: OOMB, arXiv 2602.02108.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from itertools import zip_longest

import torch
from torch import Tensor

from holotrain.reversible.main_memory import InMainMemory, Leaving, OnDevice


class ChunkLayer:
    """Keys and values of one layer, for all tokens, of which those before the present chunk are known.

    Args:
        length: tokens.
        window: the tokens that a token reads, itself included; None: all before it.

    Attributes:
        start: the first token of the present chunk.
        filled: the number of tokens whose keys and values are there.
    """

    def __init__(self, length: int, window: int | None) -> None:
        self._length, self.window, self.start, self.filled = length, window, 0, 0
        self._kept: list[Tensor] = []
        self._sums: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values that the chunk reads, up to its end: (B, heads, tokens, width of a head)."""
        new = key_states, value_states
        first, stop = self.first(), self.start + key_states.shape[-2]
        if not self._kept:
            self._kept = [each.new_empty(*each.shape[:-2], self._length, each.shape[-1]) for each in new]
        if stop > self.filled:  # else the chunk runs again
            for each, kept in zip(new, self._kept, strict=True):
                kept[..., self.start : stop, :] = each.detach()
            self.filled = stop
        if not torch.is_grad_enabled():
            return self._kept[0][..., first:stop, :], self._kept[1][..., first:stop, :]
        if not self._sums:
            self._sums = [torch.zeros_like(kept) for kept in self._kept]  # of 16 bits, too: sums of fp32 are no better
        keys, values = map(_UpTo.apply, new, self._kept, self._sums, [first] * 2, [self.start] * 2)
        return keys, values

    def first(self) -> int:
        """The first token that the chunk reads."""
        return 0 if self.window is None else max(self.start - self.window + 1, 0)


class _UpTo(torch.autograd.Function):
    """The keys (or values) from a first token up to the end of a chunk.

    The gradients of those before the chunk are added to sums; those of its own are completed by what later chunks have added.
    """

    @staticmethod
    def forward(ctx, new: Tensor, kept: Tensor, sums: Tensor, first: int, start: int) -> Tensor:
        ctx.sums, ctx.first, ctx.start, ctx.stop = sums, first, start, start + new.shape[-2]
        return kept[..., first : ctx.stop, :]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        ctx.sums[..., ctx.first : ctx.stop, :] += gradient
        return ctx.sums[..., ctx.start : ctx.stop, :], None, None, None, None


def as_read(x: Tensor) -> Tensor:
    """Queries, keys or values in the dtype to which autocast casts them before attention."""
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))


class Part:
    """Keys and values of one chunk in main memory, and the sums of their gradients, to which later chunks add."""

    def __init__(self, start: int, new: Sequence[Tensor], leaving: Leaving) -> None:
        self.start, self.stop, self.shape = start, start + new[0].shape[-2], new[0].shape
        self._leaving = leaving
        self._kept = [leaving.keep(each.detach()) for each in new]
        self._sums: list[InMainMemory | OnDevice] = []

    def fetch(self, sums: bool) -> None:
        """Begins to copy keys and values to the device, and the sums."""
        for each in self._kept:
            each.fetch()
        if sums:
            self.fetch_sums()

    def fetch_sums(self) -> None:
        for each in self._sums:
            each.fetch()

    def take(self) -> list[Tensor]:
        """Keys and values."""
        return [each.take() for each in self._kept]

    def take_sums(self) -> list[Tensor]:
        """The sums of their gradients; none: no chunk has read them yet."""
        return [each.take() for each in self._sums]

    def add(self, gradients: Sequence[Tensor]) -> None:
        if not self._sums:
            self._sums = [self._leaving.keep(each) for each in gradients]
            return
        for sums, gradient in zip(self._sums, gradients, strict=True):
            self._leaving.put(sums, sums.take() + gradient)


class HostLayer(ChunkLayer):
    """Keys and values of one layer in main memory, which the attention of :mod:`holotrain.reversible.chunk_attention` reads."""

    def __init__(self, length: int, window: int | None, leaving: Leaving) -> None:
        super().__init__(length, window)
        self._leaving = leaving
        self._parts: dict[int, Part] = {}  # by where they start

    def update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what it was given. The attention that follows finds the rest by :meth:`latest`."""
        stop = self.start + key_states.shape[-2]
        if stop > self.filled:  # else the chunk runs again
            self._parts[self.start] = Part(self.start, (as_read(key_states), as_read(value_states)), self._leaving)
            self.filled = stop
        if _latest.get() is not None:
            raise ValueError("an attention did not read its layer's cache by transformers' sdpa, so keys stay on the device")
        _latest.set(self)
        return key_states, value_states

    @staticmethod
    def latest(key: Tensor) -> HostLayer:
        """The layer that was updated last, with these keys, once."""
        layer = _latest.get()
        if layer is None or key.shape != layer.own().shape:
            raise ValueError("an attention reads something else than what its layer's cache keeps, so keys stay on the device")
        _latest.set(None)
        return layer

    def own(self) -> Part:
        """The part of the present chunk."""
        return self._parts[self.start]

    def before(self, sums: bool = False) -> Iterator[Part]:
        """The parts before the present chunk that it reads. The first is fetched now, each other one while the one before it is
        used."""
        parts = [part for part in self._parts.values() if part.start < self.start and part.stop > self.first()]
        for part in parts[:1]:
            part.fetch(sums)
        return _one_ahead(parts, sums)


def _one_ahead(parts: list[Part], sums: bool) -> Iterator[Part]:
    for part, following in zip_longest(parts, parts[1:]):
        if following is not None:
            following.fetch(sums)
        yield part


_latest: ContextVar[HostLayer | None] = ContextVar("the layer that was updated last", default=None)


class ChunkedKeys:
    """Keys and values of all layers. A block may run again with them: what is there already is not added twice.

    Args:
        windows: of each layer; None: it reads all.
        length: tokens.
        on_host: they are in main memory.
    """

    def __init__(self, windows: Sequence[int | None], length: int, on_host: bool) -> None:
        self._leaving = leaving = Leaving()
        self.layers = [HostLayer(length, each, leaving) if on_host else ChunkLayer(length, each) for each in windows]

    def begin(self, start: int) -> None:
        """Before the chunk that begins at a token."""
        _latest.set(None)
        for layer in self.layers:
            layer.start = start

    def are_filled(self, stop: int) -> bool:
        """Whether each layer has keys and values of all tokens before one."""
        return all(layer.filled == stop for layer in self.layers)

    def finish(self) -> None:
        """After a step."""
        self._leaving.finish()
