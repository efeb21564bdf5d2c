"""Tensors that are kept in pinned main memory, and come to their device ahead of their use."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from holotrain.reversible.context import has_no_data
from holotrain.reversible.side_stream import SameStream, SideStream, side_of


class InMainMemory:
    """A copy of a tensor in pinned main memory, which a second stream makes while the main one computes.

    Raises a RuntimeError if memory cannot be pinned.
    """

    def __init__(self, x: Tensor, side: SideStream | SameStream) -> None:
        self._side, self._device, self._dtype, self._layout = side, x.device, x.dtype, (x.size(), x.stride())
        # A plan counts the memory of the device alone, and has nothing to copy.
        self._host = None if has_no_data(x) else torch.empty_like(x, device="cpu", pin_memory=True)
        self._copied: Any = None
        self._fetched: tuple[Tensor, Any] | None = None
        self.put(x)

    def put(self, x: Tensor) -> None:
        """Begins the copy to main memory of a tensor, which must stay until :meth:`settle`."""
        self._copied = self._side.run(lambda: None if self._host is None else _copy(x, self._host))

    def settle(self) -> None:
        """Has what is submitted from now on wait for the copy to main memory."""
        self._side.wait(self._copied)

    def fetch(self) -> None:
        """Begins the copy to the device."""
        if self._fetched is None:
            copies: list[Tensor] = []
            done = self._side.run(lambda: copies.append(self._on_device()))
            self._fetched = copies[0], done

    def take(self) -> Tensor:
        """The tensor on the device, for what is submitted from now on."""
        self.fetch()
        assert self._fetched is not None
        (x, done), self._fetched = self._fetched, None
        self._side.wait(done)
        return x

    def _on_device(self) -> Tensor:
        x = torch.empty_strided(*self._layout, dtype=self._dtype, device=self._device)
        return x if self._host is None else _copy(self._host, x)


def _copy(source: Tensor, target: Tensor) -> Tensor:
    return target.copy_(source.detach(), non_blocking=True)


class OnDevice:
    """Takes its place on a CPU, whose memory is main memory."""

    def __init__(self, x: Tensor) -> None:
        self._x = x.clone()

    def put(self, x: Tensor) -> None:
        self._x = x

    def settle(self) -> None: ...

    def fetch(self) -> None: ...

    def take(self) -> Tensor:
        return self._x


class Leaving:
    """Tensors on their way to main memory, which stay until they are there."""

    def __init__(self) -> None:
        self._tensors: deque[tuple[InMainMemory | OnDevice, Tensor]] = deque()

    def keep(self, x: Tensor) -> InMainMemory | OnDevice:
        """Begins to copy a tensor to main memory."""
        side = side_of(x)
        kept = OnDevice(x) if side is None else InMainMemory(x, side)
        self._add(kept, x)
        return kept

    def put(self, kept: InMainMemory | OnDevice, x: Tensor) -> None:
        """Begins to replace what is kept."""
        kept.put(x)
        self._add(kept, x)

    def finish(self, most: int = 0) -> None:
        """Lets go of the oldest tensors, but for some."""
        while len(self._tensors) > most:
            kept, _ = self._tensors.popleft()
            kept.settle()

    def _add(self, kept: InMainMemory | OnDevice, x: Tensor) -> None:
        self._tensors.append((kept, x))
        self.finish(most=4)  # keys and values of two layers, or of two chunks
