"""The memory of one rank of several, from a single device's footprint and what the model consists of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from holotrain.planning.footprint import Footprint

SHARED_OUT = ("parameters", "gradients", "optimizer", "average")
"""Kinds of which a rank of FSDP2 holds its share."""


@dataclass(frozen=True)
class Unit:
    """Parameters whose gradients are complete at one time: a block's, or those that lie between blocks.

    Args:
        parameters: bytes, of all.
        gradients: bytes of each, in the order of the model's parameters; frozen ones have none.
        work: share of the model's arithmetic.
        block: it is gathered by itself; the rest of the model is gathered together.
    """

    parameters: int
    gradients: tuple[int, ...]
    work: float
    block: bool


def ddp_bytes(footprint: Footprint, units: Sequence[Unit], devices: int) -> int:
    """The largest of three phases, each with all gradients: they are views of buckets that stay.

    With ``gradient_as_bucket_view=True``, as our own DDP has it; without, gradients would be there twice.
    """
    if devices == 1:
        return footprint.bound
    buckets = sum(sum(unit.gradients) for unit in units)
    return max(
        buckets + sum(parts.values()) - parts["gradients"] + footprint.scratch_by_phase.get(phase, 0)
        for phase, parts in footprint.parts_by_phase.items()
    )


def fsdp_bytes(footprint: Footprint, units: Sequence[Unit], devices: int) -> int:
    """The largest of three phases, each as it is on one device but for what is shared out.

    Parameters, gradients, optimizer state and the average of weights are divided by the devices, and what an update takes for
    itself. In the forward there is beside them: what lies outside of blocks, whole, and two blocks, one in use and one
    gathered ahead. In the backward also their gradients, until they are reduced. Activations, buffers, batch and hologram
    stay as they are.
    """
    if devices == 1:
        return footprint.bound
    rest = [unit for unit in units if not unit.block]
    gathered = sum(unit.parameters for unit in rest) + _two_blocks([unit.parameters for unit in units if unit.block])
    reduced = sum(sum(unit.gradients) for unit in rest) + _two_blocks([sum(unit.gradients) for unit in units if unit.block])
    beside = {"forward": gathered, "backward": gathered + reduced, "update": 0}
    found = []
    for phase, parts in footprint.parts_by_phase.items():
        divided = (*SHARED_OUT, "temporary") if phase == "update" else SHARED_OUT
        shares = sum(-(-size // devices) if kind in divided else size for kind, size in parts.items())
        found.append(beside[phase] + shares + footprint.scratch_by_phase.get(phase, 0))
    return max(found)


def _two_blocks(sizes: Sequence[int]) -> int:
    """The most that two neighbours take."""
    return max((one + other for one, other in pairwise(sizes)), default=sum(sizes))
