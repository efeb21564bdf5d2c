"""The memory of one rank of several, from the footprint on a single device and the parts of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch.optim import Optimizer

from holotrain.optimizers import CombinedOptimizer
from holotrain.planning.footprint import Footprint

SHARED_OUT = ("parameters", "gradients", "optimizer", "average", "hologram")
"""Kinds of memory that FSDP2 shards over the ranks, but for optimizers that keep their state whole."""


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


@dataclass(frozen=True)
class Whole:
    """What an optimizer does not divide under FSDP2.

    Args:
        state: whether each rank keeps the whole state.
        copies: bytes of the largest parameter that is gathered for its step, and of what is computed like it on shards.
    """

    state: bool = False
    copies: int = 0

    @classmethod
    def of(cls, optimizer: Optimizer) -> Whole:
        """By the attributes of an optimizer that gathers parameters: ``whole_state`` and ``whole_copies``, their number."""
        parts = optimizer.parts if isinstance(optimizer, CombinedOptimizer) else [optimizer]
        copies = [
            part.whole_copies * parameter.nbytes
            for part in parts
            if hasattr(part, "whole_copies")
            for group in part.param_groups
            for parameter in group["params"]
        ]
        return cls(any(getattr(part, "whole_state", False) for part in parts), max(copies, default=0))


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


def fsdp_bytes(footprint: Footprint, units: Sequence[Unit], devices: int, whole: Whole = Whole()) -> int:
    """The bound in bytes over the three phases, each as on one device except for what is sharded.

    Parameters, gradients, optimizer state, averaged weights, holograms and the temporary memory of an update are divided by the
    number of devices, except for what ``whole`` says: an optimizer that gathers parameters computes with them as on one device,
    and holds the copies, too. The forward also holds the parameters outside of blocks and two whole blocks: one in use and one
    gathered ahead. The backward also holds their gradients until they are reduced. Activations, buffers and batch stay whole.
    """
    if devices == 1:
        return footprint.bound
    rest = [unit for unit in units if not unit.block]
    gathered = sum(unit.parameters for unit in rest) + _two_blocks([unit.parameters for unit in units if unit.block])
    reduced = sum(sum(unit.gradients) for unit in rest) + _two_blocks([sum(unit.gradients) for unit in units if unit.block])
    beside = {"forward": gathered, "backward": gathered + reduced, "update": whole.copies}
    lasting = {*SHARED_OUT} - ({"optimizer"} if whole.state else set())
    found = []
    for phase, parts in footprint.parts_by_phase.items():
        divided = lasting | {"temporary"} if phase == "update" and not whole.copies else lasting
        shares = sum(-(-size // devices) if kind in divided else size for kind, size in parts.items())
        found.append(beside[phase] + shares + footprint.scratch_by_phase.get(phase, 0))
    return max(found)


def _two_blocks(sizes: Sequence[int]) -> int:
    """The largest sum of two neighbours."""
    return max((one + other for one, other in pairwise(sizes)), default=sum(sizes))
