"""The backward schedules: what the forward does with a block, and where the input of its replay comes from in the backward.

A :class:`Stored` block runs as it is. A :class:`Checkpointed` one keeps its inputs. A :class:`Rebuilt` one keeps nothing: the
backward has reached the streams behind it, and what the replay returns inverts the coupling, ``x2 = y2 - g(y1)``. A
:class:`Tape` holds consecutive rebuilt branches in order. It may replay one ahead, while the gradients of the branch behind it
are computed (PaReprop, arXiv 2306.09342, in units of half blocks): gradients stay on the stream of the forward, and the replay
is on a second CUDA stream.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from holotrain.reversible.block_inputs import WAYS, InputAsIs, SavedTensors
from holotrain.reversible.checks import RebuildChecks, StreamCheck
from holotrain.reversible.context import backward_id, graph_is_retained, has_no_data
from holotrain.reversible.coupling import Coupling
from holotrain.reversible.kept_results import Casts
from holotrain.reversible.reads import is_sharded, is_tensor_parallel
from holotrain.reversible.recording import Recorded
from holotrain.reversible.settings import Call
from holotrain.reversible.side_stream import SameStream, SideStream, side_of
from holotrain.reversible.tokenwise import tiles_of, why_whole
from holotrain.schedules import Schedule


class Pass:
    """One forward over the blocks of a sequence. It holds streams with their graph, which holds the tape, which must not hold it.

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
        self.tape, self.halves = Tape(), 0
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
            raise ValueError(
                "something replaced the inputs or outputs of a ReversibleBlock (a hook, or fully_shard with a "
                "MixedPrecisionPolicy, which casts the streams: set cast_forward_inputs=False and no output_dtype, and train "
                'under torch.autocast), so the block cannot be rebuilt; use backward="autograd" or "checkpoint"'
            )
        if (target._version, source._version) != self._versions:
            raise ValueError(
                "something changed the inputs or outputs of a ReversibleBlock in place (a hook), so the block cannot be "
                'rebuilt; use backward="autograd" or "checkpoint"'
            )
        return crossed

    def end(self, y1: Tensor, y2: Tensor) -> None:
        """After the last block that is rebuilt, with what it returned."""
        if self.tape is not None:
            self.has_crossed(y1, y2)
            self.tape.complete(*self.streams)
            self.tape = None


def same_tensor(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are views of the same elements in the same order."""
    same_view = a.shape == b.shape and a.stride() == b.stride() and a.storage_offset() == b.storage_offset()
    return bool(same_view and a.dtype == b.dtype and a.untyped_storage()._cdata == b.untyped_storage()._cdata)


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
    output = recorded.run(source if part is None else part, partial(_supply_from, kept))
    kept.settle()
    return output


def _supply_from(kept: InputAsIs, recorded: Recorded) -> None:
    with torch.inference_mode(False), torch.no_grad():  # as a backward may be called
        recorded.saved[:] = recorded.replay(kept.restore(), output=False)[1]


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


class OnTape(Recorded):
    """A branch on a tape, or one of its tiles.

    Attributes:
        place: on the tape.
        first: it is of the first branch, whose target nobody needs.
        crossed: its source is what the branch before it wrote; if not, it is that one's source.
        ahead: it may be replayed ahead of its turn.
    """

    coupling: Coupling
    place: int
    first: bool
    crossed: bool
    ahead: bool


class Rebuilt(Stored):
    """A block that keeps nothing: its branches are on the tape. ``ahead`` is PaReprop."""

    def update(self, name: str, branch: nn.Module, target: Tensor, source: Tensor, keywords: dict) -> Tensor:
        run, outputs = self.run, []
        tape, crossed = run.tape, run.has_crossed(source, target)
        assert tape is not None
        if run.halves == 1 and not has_no_data(source):  # one branch has nothing rebuilt before it
            tape.check = run.checks.of_blocks(run.streams[1], run.coupling.grid)
        for recorded, part in self.recorded(name, branch, source, keywords, OnTape):
            recorded.coupling, recorded.place, recorded.first = run.coupling, len(tape.branches), run.halves == 0
            recorded.crossed, recorded.ahead = crossed, self.ahead
            outputs.append(recorded.run(part, tape.supply))
            tape.branches.append(recorded)
        coupled = self.coupled(target, source, outputs)
        run.halves += 1
        run.wrote(coupled, source)
        return coupled


_KINDS: dict[str, type[Stored]] = {"stored": Stored, "checkpointed": Checkpointed, "rebuilt": Rebuilt}

_no_room: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""Branches that found no memory to run ahead, and how many elements a stream had then."""


class Tape:
    """Holds consecutive branches and rebuilds their inputs in the backward.

    The graph holds the tape, and the tape never the graph. Only the streams after the last branch are kept from the forward.

    Attributes:
        check: of the stream that the first branch reads; None: it is not checked.
    """

    def __init__(self) -> None:
        self.check: StreamCheck | None = None
        self.branches: list[OnTape] = []
        # What ``branches[_position]``, the next to be rebuilt, wrote and read.
        self._streams: tuple[Tensor, ...] = ()
        self._target: Tensor | None = None  # that of the branch, as far as its tiles have been undone
        self._position = -1
        self._end: SavedTensors | None = None
        self._task = -1
        self._current: tuple[OnTape, Tensor] | None = None
        self._early: tuple[OnTape, list[Tensor], tuple[Tensor, ...], Any] | None = None

    def complete(self, target: Tensor, source: Tensor) -> None:
        """At the end of the forward, with the streams of the last branch."""
        self._end = SavedTensors(target, source)

    def supply(self, branch: OnTape) -> None:
        """Has ``branch.saved`` filled: rebuilds the streams down to the branch."""
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled():  # as a backward may be called
            with torch.inference_mode(False), torch.no_grad():
                return self.supply(branch)
        task = backward_id()
        if task != self._task or task == -1:  # -1: no backward, but a look at what a node saved
            self._begin(task)
        if self._current is not None:
            current, source = self._current
            if branch is current:  # a function reads its ctx.saved_tensors a second time
                branch.saved[:] = branch.replay(source, output=False)[1]
                return
            current.saved.clear()
        early, self._early = self._early, None
        if early is not None and self._side is not None:
            self._side.wait(early[-1])
            early[0].release()
        if early is not None and early[0] is branch:
            _, branch.saved[:], (_, source), _ = early
        else:
            if self._position < branch.place:
                raise RuntimeError(
                    f"the backward needs the activations of branch {branch.name} again after it went on to earlier branches, "
                    "where they are released; call the backward before with retain_graph=True"
                )
            while self._position > branch.place:
                self._rebuild()
            source = self._streams[1]
            branch.saved[:] = self._rebuild()
        self._current = branch, source
        if self._side is not None:
            self._run_ahead(self._side)

    def _begin(self, task: int) -> None:
        self._task = task
        if self._end is None:
            return  # an earlier backward, which did not retain the graph, has advanced the tape to here
        for branch in self.branches:
            branch.saved.clear()
        self._streams, self._position = self._end.tensors(), len(self.branches) - 1
        self._current, self._early, self._target = None, None, None
        self._side = side_of(self._streams[0])
        if not graph_is_retained():
            self._end = None

    def _rebuild(self, ahead: bool = False) -> list[Tensor]:
        """Runs the next branch again and inverts its coupling; returns what it saved."""
        branch, (coupled, source) = self.branches[self._position], self._streams
        if branch.place == 0 and self.check is not None:
            self.check.compare(source, coupled)
        output, saved = branch.replay(source, not branch.first, ahead)
        if not branch.first:
            self._undo(branch, coupled, source, output)
        self._position -= 1
        return saved

    def _undo(self, branch: OnTape, coupled: Tensor, source: Tensor, output: Tensor) -> None:
        """Inverts the coupling of a branch or of a tile; the first tile, which comes last, completes that of its branch."""
        if branch.tile is None:
            target = branch.coupling.undo(coupled, source, output)
        else:
            tile = slice(None), branch.tile
            target = self._target = torch.empty_like(coupled) if self._target is None else self._target
            target[tile] = branch.coupling.undo(coupled[tile], source[tile], output)
            if branch.tile.start > 0:
                return
            self._target = None
        self._streams = (source, target) if branch.crossed else (target, source)

    def _run_ahead(self, side: SideStream | SameStream) -> None:
        """Runs the next branch, if it may run ahead.

        The side stream waits for the main one first. So the main one has let go of what it used of the side's memory.
        """
        if self._position < 0:
            return
        branch, streams, saved = self.branches[self._position], self._streams, []
        size = streams[0].numel()
        # Nobody would wait for a branch without gradient.
        if not branch.ahead or not branch.kinds or size >= _no_room.get(branch.module, math.inf):
            return
        try:
            done = side.run(lambda: saved.extend(self._rebuild(ahead=True)))
        except torch.OutOfMemoryError:
            if is_tensor_parallel(branch.module):
                raise  # other processes would meet the branch's collectives in another order
            if not _no_room:
                warnings.warn(
                    "there is no memory to recompute one block beside the gradients of another; where this happens, blocks are "
                    "recomputed in turn from now on, in batches as large as this one",
                    stacklevel=2,
                )
            _no_room[branch.module] = size  # each attempt empties the allocator's cache, and waits for the device
            return  # put off until the memory of the branch behind it is free
        self._early = branch, saved, streams, done  # the streams too: the side stream reads them until ``done``
