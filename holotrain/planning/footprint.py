"""The memory of one training step in bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

from holotrain.planning.ledger import Ledger

PHASES = ("forward", "backward", "update")
"""Phases of a step: the loss; its gradients; clipping and the optimizer step."""

LASTING = ("parameters", "buffers", "gradients", "optimizer", "average", "hologram", "batch")
"""Kinds of memory that outlive a phase. What the forward stores for the backward are activations; the rest is temporary."""


@dataclass(frozen=True)
class Footprint:
    """The memory of a step, in bytes.

    ``peak`` is the memory of the tensors: all storages, as the device's allocator rounds them, and the temporaries of PyTorch's
    own kernels that are known exactly. :attr:`bound` adds the scratch that operations may hold inside themselves on a CPU.
    Scratch depends on the CPU and on libraries, so only an upper bound of it is known: a step fits in ``bound`` bytes.

    Args:
        peak: the most bytes that are alive at once.
        phase: the phase of the peak.
        parts: what the peak consists of, by kind: those of :data:`LASTING`, ``activations`` and ``temporary``.
        by_phase: the peak of each phase.
        parts_by_phase: what the peak of each phase consists of.
        scratch_by_phase: how much scratch may add to the peak of each phase.
    """

    peak: int
    phase: str
    parts: dict[str, int]
    by_phase: dict[str, int]
    parts_by_phase: dict[str, dict[str, int]]
    scratch_by_phase: dict[str, int] = field(default_factory=dict)

    @property
    def bound(self) -> int:
        """The most bytes in use at once, with scratch: this must fit."""
        return max(peak + self.scratch_by_phase.get(phase, 0) for phase, peak in self.by_phase.items())

    @property
    def scratch(self) -> int:
        """How much scratch may add to the peak."""
        return self.bound - self.peak

    @classmethod
    def of(cls, ledger: Ledger) -> Footprint:
        by_phase = {phase: ledger.peak(phase) for phase in PHASES}
        phase = max(by_phase, key=by_phase.__getitem__)
        parts = {phase: _parts(ledger.at_peak(phase)) for phase in PHASES}
        scratch = {phase: ledger.bound(phase) - peak for phase, peak in by_phase.items()}
        return cls(by_phase[phase], phase, parts[phase], by_phase, parts, scratch)


def _parts(found: dict[str, int]) -> dict[str, int]:
    parts = {kind: found.pop(kind, 0) for kind in LASTING}
    # The ledger cannot distinguish a forward's temporaries from what its backward needs. At the peak they are small.
    parts["activations"] = found.pop("forward", 0)
    parts["temporary"] = sum(found.values())
    return parts
