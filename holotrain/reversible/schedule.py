"""The backward schedules: what the forward does with a block, and where the input of its replay comes from in the backward.

A :class:`Stored` block runs as it is. A :class:`Checkpointed` one keeps its inputs. A :class:`Rebuilt` one keeps nothing: its
branches go on a tape (:mod:`holotrain.reversible.tape`), which rebuilds their inputs. A :class:`Pass` is one forward.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from holotrain.reversible.block_inputs import WAYS
from holotrain.reversible.checks import RebuildChecks
from holotrain.reversible.compiled import compiled_call
from holotrain.reversible.context import has_no_data
from holotrain.reversible.coupling import Coupling, same_tensor
from holotrain.reversible.grid import Grid
from holotrain.reversible.kept_results import Casts
from holotrain.reversible.reads import is_sharded
from holotrain.reversible.recording import Recorded
from holotrain.reversible.settings import Call
from holotrain.reversible.tape import OnTape, Tape
from holotrain.reversible.tokenwise import tiles_of, why_whole
from holotrain.schedules import COMPILED, Schedule, kind_of, planned_as


class Pass:
    """One forward over the blocks of a sequence.

    It holds streams, whose graph holds the tape. So a tape holds no pass.

    Args:
        device: of the streams.
        grid: of the streams; None: they are not rounded.
        checks: of what is rebuilt.
        tile: tokens of a tile, in which branches are taken that work token by token; None: all are taken whole.

    Attributes:
        tape: of the rebuilt blocks that end here; None: the latest block is not rebuilt.
        streams: what the latest rebuilt branch wrote, and what it read.
        halves: the number of branches on the tape, each with all its tiles.
    """

    streams: tuple[Tensor, Tensor]
    halves: int

    def __init__(self, device: torch.device, grid: Grid | None, checks: RebuildChecks, tile: int | None = None) -> None:
        self.call, self.grid, self.checks, self.tile = Call(device), grid, checks, tile
        self.tape: Tape | None = None

    def of_block(self, number: int, schedule: Schedule, block: nn.Module, streams: tuple[Tensor, Tensor]) -> BlockSchedule:
        """What is done with the next block; ``number`` is for a trace, and ``streams`` are those before the block."""
        kind = _KINDS[schedule.kind]
        if kind is not Rebuilt:
            self.end(*streams)
        elif self.tape is None:
            self._begin_tape(*streams)
        if kind is Stored:
            self.call.present = None  # a stored block may draw random numbers
        return kind(self, number, schedule, block)

    def _begin_tape(self, x1: Tensor, x2: Tensor) -> None:
        if x1.dtype.itemsize < 4:
            warnings.warn(
                f"streams of {x1.dtype} are rounded at every addition, so rebuilt activations and gradients are inexact (by up "
                "to 0.3 after 96 blocks); keep the streams in fp32 and train under torch.autocast",
                stacklevel=5,
            )
        self.tape, self.halves = Tape(), 0
        self.hold(x1, x2)

    def hold(self, target: Tensor, source: Tensor) -> None:
        """At the start of a tape, and after each branch on it, with what the branch wrote and what it read."""
        self.streams, self._versions = (target, source), (target._version, source._version)

    def has_crossed(self, first: Tensor, second: Tensor) -> bool:
        """Whether the first tensor is what the latest branch wrote, and the second what it read; False: the reverse.

        Raises:
            ValueError: they are neither, so a hook replaced or changed them.
        """
        target, source = self.streams
        crossed = first is target or (first is not source and same_tensor(first, target))
        pair = (first, second) if crossed else (second, first)
        if (pair[0] is not target or pair[1] is not source) and not all(map(same_tensor, pair, self.streams)):
            how = (
                "replaced the inputs or outputs of a ReversibleBlock (a hook, or fully_shard with a MixedPrecisionPolicy, "
                "which casts the streams: set cast_forward_inputs=False and no output_dtype, and train under torch.autocast)"
            )
        elif (target._version, source._version) != self._versions:
            how = "changed the inputs or outputs of a ReversibleBlock in place (a hook)"
        else:
            return crossed
        raise ValueError(f'something {how}, so the block cannot be rebuilt; use backward="autograd" or "checkpoint"')

    def end(self, y1: Tensor, y2: Tensor) -> None:
        """After the last block that is rebuilt, with what it returned."""
        if self.tape is not None:
            self.has_crossed(y1, y2)
            self.tape.complete(*self.streams)
            self.tape = None


class BlockSchedule(ABC):
    """What is done with one block in one forward. A new schedule is a subclass, named in ``_KINDS``.

    Args:
        current: the forward.
        number: of the block, for a trace.
        schedule: its options.
    """

    def __init__(self, current: Pass, number: int, schedule: Schedule, block: Any) -> None:
        self.current, self.number, self.schedule = current, number, schedule
        self.coupling: Coupling = block.coupling(current.grid)
        self.may_run_ahead = schedule.ahead and not is_sharded(type(block))

    @abstractmethod
    def update(self, name: str, branch: nn.Module, target: Tensor, source: Tensor, keywords: dict) -> Tensor:
        """Runs a branch of the block on the source, and returns the target, updated with its output."""

    def recorded(
        self, name: str, branch: nn.Module, source: Tensor, keywords: dict, kind: type[Recorded] = Recorded
    ) -> Iterator[tuple[Any, Tensor]]:
        """The branch, to be recorded, and what it reads; once for each tile, if it is taken in tiles."""
        call, tokens = self.current.call, self.current.tile
        given = f"{self.number}.{name}", branch, keywords, call, self.schedule.keep, None
        # Where the input is not kept as it is, each tile would fetch or restore the whole.
        if tokens is None or self.schedule.input != "checkpoint" or why_whole(branch, tokens, source, keywords):
            yield kind(*given), source
            return
        casts = Casts() if call.settings.casts_weights else None
        parts = torch.unsafe_split(source, tokens, 1)  # no views: what a branch writes to its part is noticed
        for tile, part in zip(tiles_of(source, tokens), parts, strict=True):
            yield kind(*given, tile, casts), part.contiguous()

    def coupled(self, target: Tensor, source: Tensor, outputs: list[Tensor]) -> Tensor:
        # One alone may be no tensor, which the coupling refuses.
        return self.coupling.couple(target, source, outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1))


class Stored(BlockSchedule):
    """Autograd keeps all activations."""

    def update(self, name: str, branch: nn.Module, target: Tensor, source: Tensor, keywords: dict) -> Tensor:
        return self.coupling.update(name, branch, target, source, keywords)


class Checkpointed(BlockSchedule):
    """The inputs of branches are kept, in one of the :data:`~holotrain.reversible.block_inputs.WAYS`."""

    def update(self, name: str, branch: nn.Module, target: Tensor, source: Tensor, keywords: dict) -> Tensor:
        if self.schedule.input not in WAYS:
            output = checkpointed(branch, source, backward=self.schedule.input, forward=partial(branch, **keywords))
            return self.coupling.couple(target, source, output)
        outputs = [
            from_stored(recorded, source, self.schedule.input, part)
            for recorded, part in self.recorded(name, branch, source, keywords)
        ]
        return self.coupled(target, source, outputs)


class Rebuilt(BlockSchedule):
    """Nothing is kept: branches are on the tape. With ``ahead`` this is PaReprop."""

    def update(self, name: str, branch: nn.Module, target: Tensor, source: Tensor, keywords: dict) -> Tensor:
        current, outputs = self.current, []
        tape, crossed = current.tape, current.has_crossed(source, target)
        assert tape is not None
        if current.halves == 1 and not has_no_data(source):  # one branch has nothing rebuilt before it
            tape.check = current.checks.of_blocks(current.streams[1], current.grid)
        for recorded, part in self.recorded(name, branch, source, keywords, OnTape):
            recorded.coupling, recorded.place, recorded.first = self.coupling, len(tape.branches), current.halves == 0
            recorded.crossed, recorded.ahead = crossed, self.may_run_ahead
            recorded.fused &= current.grid is None  # code of another graph may differ by the last bit
            outputs.append(recorded.run(part, tape.supply))
            tape.branches.append(recorded)
        coupled = self.coupled(target, source, outputs)
        current.halves += 1
        current.hold(coupled, source)
        return coupled


_KINDS: dict[str, type[BlockSchedule]] = {"stored": Stored, "checkpointed": Checkpointed, "rebuilt": Rebuilt}


def from_stored(recorded: Recorded, source: Tensor, way: str = "checkpoint", part: Tensor | None = None) -> Any:
    """The branch's output; the branch is replayed in the backward from the source.

    Args:
        way: how the source is kept, one of :data:`~holotrain.reversible.block_inputs.WAYS`.
        part: what a tile takes of the source.
    """
    kept = WAYS[way](source)

    def supply(recorded: Recorded) -> None:
        with torch.inference_mode(False), torch.no_grad():  # as a backward may be called
            recorded.saved[:] = recorded.replay(kept.restore(), output=False)[1]

    output = recorded.run(source if part is None else part, supply)
    kept.settle()
    return output


def checkpointed(
    module: nn.Module,
    x: Tensor,
    *,
    name: str | None = None,
    backward: str = "checkpoint",
    forward: Callable | None = None,
    **keywords: Any,
) -> Any:
    """``module(x, **keywords)``, which keeps ``x`` alone and is recomputed in the backward.

    Args:
        name: in a trace; None: the module's class.
        backward: how ``x`` is kept, one of :data:`~holotrain.reversible.block_inputs.WAYS`, or a compiled schedule.
        forward: what to call instead of the module, without the module's hooks.
    """
    call = module if forward is None else forward
    if torch.compiler.is_compiling():  # the compiler checkpoints by rules of its own
        return checkpoint(call, x, use_reentrant=False, **keywords)
    way = COMPILED.get(kind_of(backward), backward)

    def recomputed() -> Any:
        return from_stored(Recorded(name or type(module).__name__, module, keywords, Call(x.device), (), forward), x, way)

    if way == backward:
        return recomputed()
    if has_no_data(x) or torch._C._len_torch_dispatch_stack():  # a plan, or what sees single operations; private, as in context
        return recomputed() if planned_as(backward) == way else call(x, **keywords)
    return compiled_call(module, backward, call, x, keywords, recomputed)
