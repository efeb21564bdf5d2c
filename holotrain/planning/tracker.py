"""Records all bytes that operations allocate and free, in order, on real or fake tensors.

A storage counts from the operation that makes it until nothing refers to it. The tracker does not see what an operation
allocates internally. The allocator gives the part that is known exactly (``within``, part of the peak) and a bound of the rest
(``scratch``). A :class:`Footprint` is what a tracker recorded of a training step.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from holotrain.planning.devices import CPU, Allocator
from holotrain.planning.fake_tensors import is_wrapper_subclass

PHASES = ("forward", "backward", "update")
"""Phases of a step: the loss; its gradients; clipping and the optimizer step."""

LASTING = ("parameters", "buffers", "gradients", "optimizer", "average", "hologram", "batch")
"""Kinds of memory that outlive a phase. What the forward stores for the backward are activations; the rest is temporary."""


@dataclass(eq=False)
class Allocation:
    """One storage: its bytes, as its allocator counts them, and its kind.

    ``kind`` is the phase in which it was made, or ``head`` after the last block of a forward, until
    :meth:`AllocationTracker.label` changes it.
    """

    bytes: int
    kind: str


@dataclass
class Event:
    """An allocation was made or freed. ``change``: of the bytes alive; ``after``: bytes alive after it."""

    allocation: Allocation
    change: int
    after: int
    phase: str


@dataclass(eq=False)
class AllocationTracker:
    """Records the storages of operations that run inside of :meth:`tracking`."""

    allocator: Allocator = CPU
    phase: str = "before"
    kind: str = "before"
    alive: int = 0
    events: list[Event] = field(default_factory=list)
    _of_storage: dict[int, Allocation] = field(default_factory=dict)

    def enter(self, phase: str) -> None:
        """Begins a phase: later events belong to it."""
        self.phase = self.kind = phase

    def enter_head(self) -> None:
        """What a forward makes from here on is of the head and the loss."""
        if self.phase == "forward":
            self.kind = "head"

    def add(self, kind: str, size: int) -> None:
        """Counts bytes that have no tensor."""
        self._note(Allocation(size, kind))

    def add_temporary(self, size: int) -> None:
        """Counts bytes that are allocated and freed at once."""
        if size:
            allocation = Allocation(size, self.kind)
            self._note(allocation)
            self._note(allocation, freed=True)

    def label(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Sets the kind of tensors, and counts those that are not known yet. Tensors without a storage are passed over."""
        for tensor in tensors:
            if tensor.layout is torch.strided:
                self.count(tensor).kind = kind

    def count(self, tensor: Tensor) -> Allocation:
        """The allocation behind a tensor."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._of_storage:
            return self._of_storage[key]
        allocation = self._of_storage[key] = Allocation(self.allocator.rounded(storage.nbytes()), self.kind)
        self._note(allocation)

        def freed() -> None:
            del self._of_storage[key]
            self._note(allocation, freed=True)

        weakref.finalize(storage, freed).atexit = False
        return allocation

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor was made in this phase, is not a view, and is held by autograd's engine once."""
        made_here = self.count(tensor).kind == self.kind and not tensor._is_view()
        if not isinstance(tensor, FakeTensor) and (torch.is_grad_enabled() or _storage_is_shared(tensor)):
            return False  # a value that others may read must not change
        return made_here and tensor._use_count() <= _references_when_held_once()  # ty: ignore[missing-attribute]

    def _note(self, allocation: Allocation, freed: bool = False) -> None:
        change = -allocation.bytes if freed else allocation.bytes
        self.alive += change
        self.events.append(Event(allocation, change, self.alive, self.phase))

    @contextmanager
    def tracking(self):
        """Inside the context the results of operations are counted."""
        _references_when_held_once()  # which cannot be found out inside an operation
        with _Tracking(self):
            yield

    def peak(self, phase: str | None = None) -> int:
        """The most bytes alive at once; ``phase``: only within it."""
        return max((event.after for event in self.events if phase in (None, event.phase)), default=0)

    def parts(self, phase: str) -> dict[str, int]:
        """What the first moment of a phase's peak consists of, by kind."""
        peak, found = self.peak(phase), Counter[str]()
        for event in self.events:
            found[event.allocation.kind] += event.change
            if event.after == peak and event.phase == phase:
                break
        parts = {kind: found.pop(kind, 0) for kind in LASTING}
        # The tracker cannot distinguish a forward's temporaries from what its backward needs. At the peak they are small.
        parts["activations"], parts["head"] = found.pop("forward", 0), found.pop("head", 0)
        parts["temporary"] = found.total()
        return parts


class _Tracking(TorchDispatchMode):
    def __init__(self, tracker: AllocationTracker) -> None:
        super().__init__()
        self._tracker = tracker

    def __torch_dispatch__(self, func, types, args: tuple[Any, ...] = (), kwargs=None):
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].device  # the most frequent call, answered here for speed
        if is_wrapper_subclass(types):
            return NotImplemented
        tracker = self._tracker
        if func is torch.ops.aten.add.Tensor and _engine_adds() and tracker.owns(args[0]):
            # Without a dispatch mode autograd accumulates gradients in place.
            result = torch.ops.aten.add_.Tensor(*args, **(kwargs or {}))
        else:
            result = func(*args, **(kwargs or {}))
        for leaf in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                tracker.count(leaf)
        tracker.add_temporary(tracker.allocator.within(func, args, result))
        return result


class _Counting(TorchDispatchMode):
    references = 0

    def __torch_dispatch__(self, func, types, args: tuple[Any, ...] = (), kwargs=None):
        if func is torch.ops.aten.add.Tensor and _engine_adds():
            self.references = args[0]._use_count()
        return func(*args, **(kwargs or {}))


def _storage_is_shared(tensor: Tensor) -> bool:
    # Private: nothing public tells it. The tensor and the storage's object here are two.
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > 2


@cache
def _references_when_held_once() -> int:
    """References to a gradient that the engine is about to add to, when nothing else needs it: the versions of torch differ."""
    with torch.enable_grad():
        x = torch.ones(1, requires_grad=True)
        y = x.sin()
        total = y.sin().sum() + y.cos().sum()
    with _Counting() as counting:
        total.backward()
    return counting.references


def _engine_adds() -> bool:
    """Whether autograd's engine itself called the current operation, not the backward of a function."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith(("_compile.py", "eval_frame.py")):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


@dataclass(frozen=True)
class Footprint:
    """The memory of a step, in bytes.

    ``peak`` is the memory of the tensors: all storages, as the device's allocator rounds them, and the temporaries of PyTorch's
    own kernels that are known exactly. A step fits in ``bound`` bytes, with what operations and libraries may hold inside.

    Args:
        peak: the most bytes that are alive at once.
        phase: the phase of the peak.
        parts: what the peak consists of, by kind: those of :data:`LASTING`, ``activations``, ``head`` (what the forward makes
            after its last block: logits, the loss) and ``temporary``.
        by_phase: the peak of each phase.
        parts_by_phase: what the peak of each phase consists of.
        scratch: the most that operations and libraries may hold in addition.
    """

    peak: int
    phase: str
    parts: dict[str, int]
    by_phase: dict[str, int]
    parts_by_phase: dict[str, dict[str, int]]
    scratch: int = 0

    @property
    def bound(self) -> int:
        """The most bytes in use at once: these must fit."""
        return self.peak + self.scratch

    @property
    def lasting(self) -> int:
        """What any batch needs at least: parameters, optimizer state and the like."""
        return sum(self.parts[kind] for kind in LASTING if kind not in ("gradients", "batch"))

    @classmethod
    def of(cls, tracker: AllocationTracker) -> Footprint:
        by_phase = {phase: tracker.peak(phase) for phase in PHASES}
        phase = max(by_phase, key=by_phase.__getitem__)
        parts = {phase: tracker.parts(phase) for phase in PHASES}
        peak = by_phase[phase]
        return cls(peak, phase, parts[phase], by_phase, parts, tracker.allocator.scratch(peak))
