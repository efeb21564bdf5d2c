"""The memory of one training step, in figures."""

from __future__ import annotations

from dataclasses import dataclass, field

from holotrain.planning.ledger import Ledger

PHASES = ("forward", "backward", "update")
"""Of a step: the loss; its gradients; what is done with them, up to the end of the optimizer's step."""

LASTING = ("parameters", "buffers", "gradients", "optimizer", "average", "hologram", "batch")
"""Kinds that outlive a phase. What a forward made and a backward still needs are activations; the rest is temporary."""


@dataclass(frozen=True)
class Footprint:
    """Bytes.

    ``peak`` is what a step takes for its tensors: the storages that its operations make, as the device's allocator rounds them,
    and the temporaries of PyTorch's own kernels that are known exactly. :attr:`bound` adds the scratch that operations may
    hold within themselves on a CPU. It depends on the CPU and on libraries, so it is an upper bound: a step fits in ``bound``
    bytes.

    Args:
        peak: the most that is alive at once.
        phase: the one in which that is.
        parts: what the peak is made of, by kind: those of :data:`LASTING`, ``activations`` and ``temporary``.
        by_phase: the peak of each phase.
        parts_by_phase: what each of these is made of.
        scratch_by_phase: how far scratch may reach beyond the peak of each phase.
    """

    peak: int
    phase: str
    parts: dict[str, int]
    by_phase: dict[str, int]
    parts_by_phase: dict[str, dict[str, int]]
    scratch_by_phase: dict[str, int] = field(default_factory=dict)

    @property
    def bound(self) -> int:
        """The most that is taken at once, scratch included: what has to fit."""
        return max(peak + self.scratch_by_phase.get(phase, 0) for phase, peak in self.by_phase.items())

    @property
    def scratch(self) -> int:
        """How far scratch may reach beyond the peak."""
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
    # A forward's own temporaries cannot be told from what its backward waits for: at its peak they are few.
    parts["activations"] = found.pop("forward", 0)
    parts["temporary"] = sum(found.values())
    return parts
