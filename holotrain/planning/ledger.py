"""Every byte that operations allocate and free, in order: real tensors or fake ones, the same account.

A storage counts from the operation that made it until nothing refers to it. What an operation holds within itself is not seen,
but for those in :data:`WITHIN`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(eq=False)
class Allocation:
    """One storage: its bytes as its allocator counts them, and what it is for.

    ``kind`` is the phase that it was made in, until :meth:`Ledger.label` says more.
    """

    bytes: int
    kind: str


@dataclass
class Event:
    """An allocation made or freed; ``after``: the bytes alive from here."""

    allocation: Allocation
    made: bool
    after: int
    phase: str


@dataclass(eq=False)
class Ledger:
    """Follows the storages of what runs inside of :meth:`watching`.

    Args:
        rounded: from a storage's bytes to what its allocator takes for them.
    """

    rounded: Callable[[int], int] = int
    phase: str = "before"
    alive: int = 0
    events: list[Event] = field(default_factory=list)
    _of_storage: dict[int, Allocation] = field(default_factory=dict)

    def enter(self, phase: str) -> None:
        """From here events belong to this phase."""
        self.phase = phase

    def add(self, kind: str, size: int) -> None:
        """Counts bytes that are known without a tensor."""
        self._note(Allocation(size, kind), True)

    def pass_by(self, size: int) -> None:
        """Counts bytes that are there for a moment."""
        allocation = Allocation(self.rounded(size), self.phase)
        self._note(allocation, True)
        self._note(allocation, False)

    def label(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Says what tensors are for, and counts those that are new here."""
        for tensor in tensors:
            self.count(tensor).kind = kind

    def count(self, tensor: Tensor) -> Allocation:
        """The allocation behind a tensor."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._of_storage.get(key)
        if known is not None:
            return known
        allocation = self._of_storage[key] = Allocation(self.rounded(storage.nbytes()), self.phase)
        self._note(allocation, True)

        def freed(_: object) -> None:
            del self._of_storage[key]
            self._note(allocation, False)

        weakref.finalize(storage, freed, None).atexit = False
        return allocation

    def _note(self, allocation: Allocation, made: bool) -> None:
        self.alive += allocation.bytes if made else -allocation.bytes
        self.events.append(Event(allocation, made, self.alive, self.phase))

    @contextmanager
    def watching(self):
        """Inside, what operations make is counted."""
        with _Watch(self):
            yield

    def peak(self, *phases: str) -> int:
        """The most bytes alive at once; ``phases``: within these alone."""
        return max((event.after for event in self.events if not phases or event.phase in phases), default=0)

    def at_peak(self) -> dict[str, int]:
        """Bytes by kind at the moment of the peak, the first one."""
        peak, by_kind = self.peak(), {}
        for event in self.events:
            allocation = event.allocation
            by_kind[allocation.kind] = by_kind.get(allocation.kind, 0) + (allocation.bytes if event.made else -allocation.bytes)
            if event.after == peak:
                break
        return {kind: size for kind, size in by_kind.items() if size}


WITHIN: dict[OpOverload, Callable[[Tensor], int]] = {
    torch.ops.aten.logsumexp.default: lambda logits, *_: logits.nbytes,  # the exponentials, before they are summed
}
"""Bytes that an operation takes and gives back before it returns, where they are not small beside its results."""


class _Watch(TorchDispatchMode):
    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in WITHIN:
            self._ledger.pass_by(WITHIN[function](*args))
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self._ledger.count(result)
        else:
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._ledger.count(leaf)
        return result
