"""The backward schedules: what the forward does with a block, and where the input of its replay comes from in the backward.

A :class:`Stored` block runs as it is. A :class:`Checkpointed` one keeps its inputs. A :class:`Rebuilt` one keeps nothing: its
branches go on a tape (:mod:`holotrain.reversible.tape`), which rebuilds their inputs. A :class:`Pass` is one forward.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from holotrain.reversible.block_inputs import WAYS
from holotrain.reversible.checks import RebuildChecks
from holotrain.reversible.context import has_no_data
from holotrain.reversible.coupling import Coupling, same_tensor
from holotrain.reversible.kept_results import Casts
from holotrain.reversible.reads import is_sharded
from holotrain.reversible.recording import Recorded
from holotrain.reversible.settings import Call
from holotrain.reversible.tape import OnTape, Tape
from holotrain.reversible.tokenwise import tiles_of, why_whole
from holotrain.schedules import Schedule


class Pass:
    """One forward over the blocks of a sequence. It holds streams with their graph, which holds the tape: no tape may hold it.

    Args:
        device: of the streams.
        coupling: of the blocks.
        checks: of what is rebuilt.
        tile: tokens of a tile, in which branches are taken that work token by token; None: all are taken whole.

    Attributes:
        tape: of the rebuilt blocks that end here; None: the latest block is not rebuilt.
        streams: what the latest rebuilt branch wrote, and what it read.
        halves: the number of branches on the tape, each with all its tiles.
    """

    streams: tuple[Tensor, Tensor]
    halves: int

    def __init__(self, device: torch.device, coupling: Coupling, checks: RebuildChecks, tile: int | None = None) -> None:
        self.call, self.coupling, self.checks, self.tile = Call(device), coupling, checks, tile
        self.tape: Tape | None = None

    def of_block(self, number: int, schedule: Schedule, block: nn.Module, streams: tuple[Tensor, Tensor]) -> Stored:
        """The schedule of the next block; ``number`` is for a trace, and ``streams`` are those before the block."""
        kind = _KINDS[schedule.kind]
        if kind is not Rebuilt:
            self.end(*streams)
        elif self.tape is None:
            self._begin_tape(*streams)
        if kind is Stored:
            self.call.present = None  # a stored block may draw random numbers
        return kind(self, number, schedule, schedule.ahead and not is_sharded(type(block)))

    def _begin_tape(self, x1: Tensor, x2: Tensor) -> None:
        if x1.dtype.itemsize < 4:
            warnings.warn(
                f"streams of {x1.dtype} are rounded at every addition, so rebuilt activations and gradients are inexact (by up "
                "to 0.3 after 96 blocks); keep the streams in fp32 and train under torch.autocast",
                stacklevel=5,
            )
        self.tape, self.halves = Tape(self.coupling), 0
        self.wrote(x1, x2)

    def wrote(self, target: Tensor, source: Tensor) -> None:
        """After a rebuilt branch, with what it wrote and what it read."""
        self.streams, self._versions = (target, source), (target._version, source._version)

    def has_crossed(self, first: Tensor, second: Tensor) -> bool:
        """Whether two tensors are what the latest branch wrote and what it read; False if the other way round.

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


class Stored:
    """A block whose activations autograd keeps. Other schedules are subclasses.

    Args:
        run: the forward that it is part of.
        number: of the block, for a trace.
        ahead: a rebuilt branch may be replayed ahead of its turn.
    """

    def __init__(self, run: Pass, number: int, schedule: Schedule, ahead: bool) -> None:
        self.run, self.number, self.schedule, self.ahead = run, number, schedule, ahead

    def update(self, name: str, branch: nn.Module, target: Tensor, source: Tensor, keywords: dict) -> Tensor:
        """Runs a branch of the block on the source, and returns the target, updated with its output."""
        return self.run.coupling.update(name, branch, target, source, keywords)

    def recorded(
        self, name: str, branch: nn.Module, source: Tensor, keywords: dict, kind: type[Recorded] = Recorded
    ) -> Iterator[tuple[Any, Tensor]]:
        """The branch, to be recorded, and what it reads; once for each tile, if it is taken in tiles."""
        run = self.run
        given = f"{self.number}.{name}", branch, keywords, run.call, self.schedule.keep, None
        # Where the input is not kept as it is, each tile would fetch or restore the whole.
        if run.tile is None or self.schedule.input != "checkpoint" or why_whole(branch, run.tile, source, keywords):
            yield kind(*given), source
            return
        casts = Casts() if run.call.settings.casts_weights else None
        parts = torch.unsafe_split(source, run.tile, 1)  # no views: what a branch writes to its part is noticed
        for tile, part in zip(tiles_of(source, run.tile), parts, strict=True):
            yield kind(*given, tile, casts), part.contiguous()

    def coupled(self, target: Tensor, source: Tensor, outputs: list[Tensor]) -> Tensor:
        # One alone may be no tensor, which the coupling refuses.
        return self.run.coupling.couple(target, source, outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1))


class Checkpointed(Stored):
    """A block that keeps the inputs of its branches, in one of the :data:`~holotrain.reversible.block_inputs.WAYS`."""

    def update(self, name: str, branch: nn.Module, target: Tensor, source: Tensor, keywords: dict) -> Tensor:
        outputs = [
            from_stored(recorded, source, self.schedule.input, part)
            for recorded, part in self.recorded(name, branch, source, keywords)
        ]
        return self.coupled(target, source, outputs)


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
        backward: how ``x`` is kept, one of :data:`~holotrain.reversible.block_inputs.WAYS`.
        forward: what to call instead of the module, without the module's hooks.
    """
    if torch.compiler.is_compiling():  # the compiler checkpoints by rules of its own
        return checkpoint(module if forward is None else forward, x, use_reentrant=False, **keywords)
    return from_stored(Recorded(name or type(module).__name__, module, keywords, Call(x.device), (), forward), x, backward)


class Rebuilt(Stored):
    """A block that keeps nothing: its branches are on the tape. ``ahead`` is PaReprop."""

    def update(self, name: str, branch: nn.Module, target: Tensor, source: Tensor, keywords: dict) -> Tensor:
        run, outputs = self.run, []
        tape, crossed = run.tape, run.has_crossed(source, target)
        assert tape is not None
        if run.halves == 1 and not has_no_data(source):  # one branch has nothing rebuilt before it
            tape.check = run.checks.of_blocks(run.streams[1], run.coupling.grid)
        for recorded, part in self.recorded(name, branch, source, keywords, OnTape):
            recorded.place, recorded.first = len(tape.branches), run.halves == 0
            recorded.crossed, recorded.ahead = crossed, self.ahead
            outputs.append(recorded.run(part, tape.supply))
            tape.branches.append(recorded)
        coupled = self.coupled(target, source, outputs)
        run.halves += 1
        run.wrote(coupled, source)
        return coupled


_KINDS: dict[str, type[Stored]] = {"stored": Stored, "checkpointed": Checkpointed, "rebuilt": Rebuilt}
