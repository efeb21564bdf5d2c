"""What a recomputed block cannot be combined with, refused by name in the forward rather than wrong in the backward."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable
from functools import cache

from torch import Tensor, nn


class Seen:
    """Two streams as they stand at some point of the forward."""

    def __init__(self, *streams: Tensor) -> None:
        self.streams = streams
        self.versions = [stream._version for stream in streams]


def shards_itself(block: nn.Module, parts: Iterable[nn.Module]) -> bool:
    """Whether the block's parameters are gathered in its own call (FSDP2), or one of its parts talks to other processes: it
    normalises over them, or its parameters are DTensors (tensor parallelism).

    What talks is recomputed in turn: every process must start its collectives in one order, and whether overlap pays is for
    each to measure.

    Raises:
        ValueError: f or g, or a part of them, is wrapped by something that acts in forwards and backwards of its own.
    """
    found = _habit(type(block)) is not Habit.NONE
    for part in parts:
        habit = _habit(type(part))
        if habit is Habit.WRAPS:
            raise ValueError(
                f"{type(part).__name__} inside a ReversibleBlock acts once in the forward and again in the recomputation; "
                "wrap the whole model, or fully_shard the blocks"
            )
        if habit is Habit.SHARDS:
            raise ValueError(
                "fully_shard was applied to f, g or a part of them; a recomputed block gathers its parameters as a whole: "
                "apply fully_shard to the ReversibleBlock"
            )
        found = found or habit is Habit.TALKS or _is_distributed(part)
    return found


def _is_distributed(part: nn.Module) -> bool:
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and any(isinstance(parameter, tensors.DTensor) for parameter in part._parameters.values())


class Habit(enum.Enum):
    """What a class of modules does about other processes."""

    NONE = enum.auto()
    TALKS = enum.auto()
    SHARDS = enum.auto()
    WRAPS = enum.auto()


@cache
def _habit(kind: type[nn.Module]) -> Habit:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported for the question's sake
    if kind.__module__.startswith("torch.nn.parallel") or (fsdp and issubclass(kind, fsdp.FullyShardedDataParallel)):
        return Habit.WRAPS
    if fsdp and issubclass(kind, fsdp.FSDPModule):
        return Habit.SHARDS
    return Habit.TALKS if issubclass(kind, nn.SyncBatchNorm) else Habit.NONE


def require_untouched(block: nn.Module, given: Seen, entered: Seen, left: Seen, returned: Seen) -> None:
    """Refuses hooks on a block that replace or edit its inputs or outputs: the tape would not know of them.

    Raises:
        ValueError: the streams that entered the coupling are not as they were given, or those that it left are not as they
            were returned.
    """
    for before, after, which, kind in ((given, entered, "inputs", "pre-hook"), (left, returned, "outputs", "forward hook")):
        if not all(_same(a, b) for a, b in zip(before.streams, after.streams, strict=True)):
            raise ValueError(
                f"something changed the {which} of a {type(block).__name__} on the way (a {kind}, or fully_shard with a "
                "MixedPrecisionPolicy, which casts the streams: give it cast_forward_inputs=False and no output_dtype, and "
                'train under torch.autocast); the block could not be rebuilt. Use backward="autograd" or "checkpoint"'
            )
        if before.versions != after.versions:
            raise ValueError(
                f"something changed the {which} of a {type(block).__name__} in place on the way (a {kind}); the block could "
                'not be rebuilt. Use backward="autograd" or "checkpoint"'
            )


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.untyped_storage()._cdata == b.untyped_storage()._cdata
