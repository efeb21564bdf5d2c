"""Vector clocks for what runs side by side: streams of a device and threads of the host.

Each of them is an actor with a clock: what it has done itself, and what of the others' work it has waited for. Memory notes
for every byte when each actor last read and wrote it. Whoever reads a byte must have waited for all who wrote it, and whoever
writes one for all who touched it. Memory that was let go of returns to the stream that it was allocated on, which must have
waited for all other users when it allocates again, as CUDA's caching allocator has it: the next allocation may be the same.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from itertools import chain
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    import numpy as np


class Race(AssertionError):
    """Two pieces of work that may run in either order, and whose order matters."""


class Actor:
    """A stream, or a thread of the host."""

    def __init__(self, name: str) -> None:
        self.name, self.clock = name, defaultdict(int)

    def act(self) -> int:
        """Begins a piece of work; returns its time on the own clock."""
        self.clock[self] += 1
        return self.clock[self]

    def learn(self, clock: dict[Actor, int]) -> None:
        """After waiting for what had been done when ``clock`` was taken."""
        for actor, time in clock.items():
            self.clock[actor] = max(self.clock[actor], time)

    def knows(self, actor: Actor, time: int) -> bool:
        return self.clock[actor] >= time


class Memory:
    """The bytes of a storage.

    Args:
        size: in bytes.
        home: the stream on which it was allocated; None: the host, or the pool of a captured graph.
        device: ``"cuda"`` or ``"cpu"``.
        pinned: host memory from which and to which copies are asynchronous. Its allocator waits for these by itself.
    """

    def __init__(self, size: int, home: Actor | None, device: str, pinned: bool = False) -> None:
        self.size, self.home, self.device, self.pinned = size, home, device, pinned
        self.recorded: set[Actor] = set()
        """The streams of ``record_stream``, for which the allocator waits."""
        self.forget()

    def forget(self) -> None:
        """As if nobody had touched it."""
        self._read: dict[Actor, np.ndarray] = {}
        self._written: dict[Actor, np.ndarray] = {}

    def noted(self) -> tuple[dict, dict]:
        return tuple({actor: times.copy() for actor, times in table.items()} for table in (self._read, self._written))

    def restore(self, noted: tuple[dict, dict]) -> None:
        self._read, self._written = noted

    def read(self, actor: Actor, tensor: Tensor, what: str) -> None:
        _require_known(actor, self._written, tensor, f"{what} on {actor.name} reads what {{}} may not have written yet")
        self._note(self._read, actor, tensor)

    def write(self, actor: Actor, tensor: Tensor, what: str) -> None:
        _require_known(actor, self._written, tensor, f"{what} on {actor.name} overwrites what {{}} may write later")
        _require_known(actor, self._read, tensor, f"{what} on {actor.name} overwrites what {{}} may not have read yet")
        self._note(self._written, actor, tensor)

    def users(self) -> dict[Actor, int]:
        """When others than the home last touched it, without those for whom the allocator waits."""
        last = defaultdict(int)
        for actor, times in chain(self._read.items(), self._written.items()):
            if actor is not self.home and actor not in self.recorded:
                last[actor] = max(last[actor], int(times.max(initial=0)))
        return last

    def _note(self, table: dict[Actor, np.ndarray], actor: Actor, tensor: Tensor) -> None:
        if actor not in table:
            import numpy as np  # which tests on a GPU do without

            table[actor] = np.zeros(self.size, np.int32)
        _bytes_of(tensor, table[actor])[...] = actor.clock[actor]


def _bytes_of(tensor: Tensor, times: np.ndarray) -> np.ndarray:
    """The part of ``times``, which has an entry for each byte of the storage, that the tensor's entries take."""
    size = tensor.element_size()
    shape, strides = (*tensor.shape, size), (*(times.itemsize * size * step for step in tensor.stride()), times.itemsize)
    from numpy.lib.stride_tricks import as_strided

    return as_strided(times[size * tensor.storage_offset() :], shape, strides)


def _require_known(actor: Actor, table: dict[Actor, np.ndarray], tensor: Tensor, complaint: str) -> None:
    for other, times in table.items():
        if other is not actor and not actor.knows(other, int(_bytes_of(tensor, times).max(initial=0))):
            raise Race(complaint.format(other.name))


class Memories:
    """The memory of every storage that is alive, and what was let go of."""

    def __init__(self) -> None:
        self._alive: dict[int, tuple[weakref.ref, Memory]] = {}
        self._freed: dict[Actor, list[dict[Actor, int]]] = defaultdict(list)

    def of(self, tensor: Tensor) -> Memory | None:
        return self._alive.get(tensor.untyped_storage()._cdata, (None, None))[1]

    def add(self, tensor: Tensor, memory: Memory) -> Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata

        def free(_: weakref.ref) -> None:
            del self._alive[key]
            if memory.home is not None and (users := memory.users()):
                self._freed[memory.home].append(users)

        self._alive[key] = weakref.ref(storage, free), memory
        return memory

    def allocate(self, home: Actor) -> None:
        """Before ``home`` may be given what was let go of.

        Raises:
            Race: somebody whom it has not waited for may still use it.
        """
        for users in self._freed.pop(home, ()):
            for actor, time in users.items():
                if not home.knows(actor, time):
                    raise Race(f"{home.name} may be given memory that {actor.name} still uses, because it was let go of")

    def __iter__(self):
        return iter([memory for _, memory in self._alive.values()])
