"""The memory of one rank of several, from the footprint on a single device and the parts of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from holotrain.planning.footprint import Footprint

SHARED_OUT = ("parameters", "gradients", "optimizer", "average", "hologram")
"""Kinds of memory that FSDP2 shards over the ranks."""


@dataclass(frozen=True)
class Unit:
    """Parameters whose gradients are complete at the same time: those of a block, or those between blocks.

    Args:
        parameters: bytes of all parameters.
        gradients: bytes of each gradient, in the order of the model's parameters; frozen parameters have none.
        work: share of the model's arithmetic.
        block: whether it is a block, which is gathered by itself; the rest of the model is gathered together.
    """

    parameters: int
    gradients: tuple[int, ...]
    work: float
    block: bool


def ddp_bytes(footprint: Footprint, units: Sequence[Unit], devices: int) -> int:
    """The bound in bytes over the three phases, each with all gradients, which are views of permanent buckets.

    This holds with ``gradient_as_bucket_view=True``, which holotrain's DDP uses. Without it gradients would be stored twice.
    """
    if devices == 1:
        return footprint.bound
    buckets = sum(sum(unit.gradients) for unit in units)
    return max(
        buckets + sum(parts.values()) - parts["gradients"] + footprint.scratch_by_phase.get(phase, 0)
        for phase, parts in footprint.parts_by_phase.items()
    )


def fsdp_bytes(footprint: Footprint, units: Sequence[Unit], devices: int) -> int:
    """The bound in bytes over the three phases, each as on one device except for what is sharded.

    Parameters, gradients, optimizer state, averaged weights, holograms and the temporary memory of an update are divided by the
    number of devices. The forward also holds the parameters outside of blocks and two whole blocks: one in use and one gathered
    ahead. The backward also holds their gradients until they are reduced. Activations, buffers and batch stay whole.
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
    """The largest sum of two neighbours."""
    return max((one + other for one, other in pairwise(sizes)), default=sum(sizes))
