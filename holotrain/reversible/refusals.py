"""Detects in the forward what a recomputed block cannot be combined with, before gradients would be wrong."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable
from functools import cache

from torch import Tensor, nn


class Seen:
    """Two streams and their versions at one point of the forward."""

    def __init__(self, *streams: Tensor) -> None:
        self.streams = streams
        self.versions = [stream._version for stream in streams]


def shards_itself(block: nn.Module, parts: Iterable[nn.Module]) -> bool:
    """Whether the block communicates: its parameters are gathered in its call (FSDP2), or a submodule is a SyncBatchNorm or has
    DTensors as parameters (tensor parallelism).

    Such blocks are recomputed in turn. All processes must start collectives in the same order, but each measures on its own
    whether overlap is faster.

    Raises:
        ValueError: f, g or a submodule is wrapped in DDP, FSDP or similar, or sharded by itself.
    """
    found = _habit(type(block)) is not Habit.NONE
    for part in parts:
        habit = _habit(type(part))
        if habit is Habit.WRAPS:
            raise ValueError(
                f"{type(part).__name__} inside a ReversibleBlock would run twice, in the forward and in the recomputation; "
                "wrap the whole model, or apply fully_shard to the blocks"
            )
        if habit is Habit.SHARDS:
            raise ValueError(
                "fully_shard was applied to f, g or a submodule; a recomputed block gathers its parameters as a whole: "
                "apply fully_shard to the ReversibleBlock"
            )
        found = found or habit is Habit.TALKS or _is_distributed(part)
    return found


def _is_distributed(part: nn.Module) -> bool:
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and any(isinstance(parameter, tensors.DTensor) for parameter in part._parameters.values())


class Habit(enum.Enum):
    """How a class of modules communicates with other processes."""

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
    """Checks that no hook on a block replaced or edited its inputs or outputs, which a recomputation would leave out.

    Raises:
        ValueError: the inputs or outputs of the coupling differ from those of the block.
    """
    for before, after, which, kind in ((given, entered, "inputs", "pre-hook"), (left, returned, "outputs", "forward hook")):
        if not all(_same(a, b) for a, b in zip(before.streams, after.streams, strict=True)):
            raise ValueError(
                f"something replaced the {which} of a {type(block).__name__} (a {kind}, or fully_shard with a "
                "MixedPrecisionPolicy, which casts the streams: set cast_forward_inputs=False and no output_dtype, and "
                'train under torch.autocast), so the block cannot be rebuilt; use backward="autograd" or "checkpoint"'
            )
        if before.versions != after.versions:
            raise ValueError(
                f"something changed the {which} of a {type(block).__name__} in place (a {kind}), so the block cannot be "
                'rebuilt; use backward="autograd" or "checkpoint"'
            )


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.untyped_storage()._cdata == b.untyped_storage()._cdata
