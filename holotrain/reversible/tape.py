"""The engine: records the branches of one forward, and rebuilds their inputs in the backward.

A stored block runs as it is. A checkpointed branch runs again from the input that it has kept. A rebuilt branch runs again from
the stream that the backward has reached, and its output inverts the coupling: ``x2 = y2 - g(y1)``. A tape holds these branches
in order. It may run a branch ahead, while the gradients of the branch behind it are computed (PaReprop, arXiv 2306.09342, in
units of half blocks): gradients stay on the stream of the forward, and the recomputation is on a second CUDA stream.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from holotrain.reversible.backward_schedules import Casts
from holotrain.reversible.block import Coupling
from holotrain.reversible.block_inputs import SavedTensors
from holotrain.reversible.checks import RebuildChecks, StreamCheck
from holotrain.reversible.context import backward_id, graph_is_retained, has_no_data
from holotrain.reversible.reads import is_sharded, is_tensor_parallel
from holotrain.reversible.recomputation import Branch, from_stored
from holotrain.reversible.settings import Call
from holotrain.reversible.side_stream import SameStream, SideStream, side_of
from holotrain.reversible.tokenwise import tiles_of, why_whole
from holotrain.schedules import Schedule

_no_room: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""Branches that found no memory to run ahead, and how many elements a stream had then."""


class Recorder:
    """Runs the blocks of one forward by their schedules, and records what the backward needs.

    It holds streams with their graph, which holds the tape. So the tape must not hold it.

    Args:
        device: of the streams.
        checks: of what is rebuilt.
        tile: tokens of a tile, in which branches are taken that work token by token; None: all are taken whole.
    """

    def __init__(self, device: torch.device, checks: RebuildChecks, tile: int | None = None) -> None:
        self.call, self._checks, self._tile = Call(device), checks, tile
        self._tape: Tape | None = None
        # What the latest rebuilt branch wrote, and what it read.
        self._streams: tuple[Tensor, Tensor]
        self._versions: tuple[int, int]

    def begin_block(
        self,
        number: int,
        schedule: Schedule,
        coupling: Coupling,
        block: nn.Module,
        streams: tuple[Tensor, Tensor],
    ) -> None:
        """Before the next block.

        Args:
            number: for a trace.
            streams: before the block.
        """
        if schedule.kind != "rebuilt":
            self.end(*streams)
        elif self._tape is None:
            self._begin_tape(*streams)
        if schedule.kind == "stored":
            self.call.present = None  # a stored block may draw random numbers
        self._number, self._schedule, self._coupling = number, schedule, coupling
        self._ahead = schedule.ahead and not is_sharded(type(block))

    def _begin_tape(self, x1: Tensor, x2: Tensor) -> None:
        if x1.dtype.itemsize < 4:
            warnings.warn(
                f"streams of {x1.dtype} are rounded at every addition, so rebuilt activations and gradients are inexact (by up "
                "to 0.3 after 96 blocks); keep the streams in fp32 and train under torch.autocast",
                stacklevel=5,
            )
        self._halves = 0  # branches on the tape, each with all its tiles
        self._tape, self._streams, self._versions = Tape(), (x1, x2), (x1._version, x2._version)

    def update(self, name: str, module: nn.Module, target: Tensor, source: Tensor, keywords: dict) -> Tensor:
        """Runs a branch of the block on the source, and updates the target with its output."""
        schedule, coupling, tape, outputs = self._schedule, self._coupling, self._tape, []
        if schedule.kind == "stored":
            return coupling.update(name, module, target, source, keywords)
        crossed = tape is not None and self._has_crossed(source, target)
        if tape is not None and self._halves == 1 and not has_no_data(source):  # one branch has nothing rebuilt before it
            tape.check = self._checks.of_blocks(self._streams[1], coupling.grid)
        for tile, part, casts in self._tiles_of(module, source, keywords):
            options = f"{self._number}.{name}", module, keywords, self.call, schedule.keep, None, tile, casts
            if tape is None:
                outputs.append(from_stored(Branch(*options), source, schedule.input, part))
                continue
            branch = RebuiltBranch(*options)
            branch.coupling, branch.place, branch.first = coupling, len(tape.branches), self._halves == 0
            branch.crossed, branch.ahead = crossed, self._ahead
            outputs.append(branch.run(part, tape.supply))
            tape.branches.append(branch)
        # One alone may be no tensor, which the coupling refuses.
        coupled = coupling.couple(target, source, outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1))
        if tape is not None:
            self._halves += 1
            self._streams, self._versions = (coupled, source), (coupled._version, source._version)
        return coupled

    def _tiles_of(self, module: nn.Module, read: Tensor, keywords: dict) -> Iterator[tuple[slice | None, Tensor, Casts | None]]:
        """The tiles of a branch: their tokens, what they read, and what they share. One of None: all tokens."""
        # Where the input is not kept as it is, each tile would fetch or restore the whole.
        if self._tile is None or self._schedule.input != "checkpoint" or why_whole(module, self._tile, read, keywords):
            yield None, read, None
            return
        casts = Casts() if self.call.settings.casts_weights else None
        parts = torch.unsafe_split(read, self._tile, 1)  # no views: what a branch writes to its part is noticed
        for tile, part in zip(tiles_of(read, self._tile), parts, strict=True):
            yield tile, part.contiguous(), casts

    def _has_crossed(self, first: Tensor, second: Tensor) -> bool:
        """Whether two tensors are what the latest branch wrote and what it read; False if the other way round.

        Raises:
            ValueError: they are neither, so a hook replaced or changed them.
        """
        target, source = self._streams
        crossed = first is target or (first is not source and same_tensor(first, target))
        pair = (first, second) if crossed else (second, first)
        if (pair[0] is not target or pair[1] is not source) and not all(map(same_tensor, pair, self._streams)):
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
        if self._tape is not None:
            self._has_crossed(y1, y2)
            self._tape.complete(*self._streams)
            self._tape = None


def same_tensor(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are views of the same elements in the same order."""
    same_view = a.shape == b.shape and a.stride() == b.stride() and a.storage_offset() == b.storage_offset()
    return bool(same_view and a.dtype == b.dtype and a.untyped_storage()._cdata == b.untyped_storage()._cdata)


class RebuiltBranch(Branch):
    """A branch on a tape, or one of its tiles.

    Attributes:
        place: on the tape.
        first: it is of the first branch, whose target nobody needs.
        crossed: its source is what the branch before it wrote; if not, it is that one's source.
        ahead: it may run ahead of its turn.
    """

    coupling: Coupling
    place: int
    first: bool
    crossed: bool
    ahead: bool


class Tape:
    """Holds consecutive branches and rebuilds their inputs in the backward.

    The graph holds the tape, and the tape never the graph. Only the streams after the last branch are kept from the forward.

    Attributes:
        check: of the stream that the first branch reads; None: it is not checked.
    """

    def __init__(self) -> None:
        self.check: StreamCheck | None = None
        self.branches: list[RebuiltBranch] = []
        # What ``branches[_position]``, the next to be rebuilt, wrote and read.
        self._streams: tuple[Tensor, ...] = ()
        self._target: Tensor | None = None  # that of the branch, as far as its tiles have been undone
        self._position = -1
        self._end: SavedTensors | None = None
        self._task = -1
        self._current: tuple[RebuiltBranch, Tensor] | None = None
        self._early: tuple[RebuiltBranch, list[Tensor], tuple[Tensor, ...], Any] | None = None

    def complete(self, target: Tensor, source: Tensor) -> None:
        """At the end of the forward, with the streams of the last branch."""
        self._end = SavedTensors(target, source)

    def supply(self, branch: RebuiltBranch) -> None:
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
                branch.saved[:] = branch.run_again(source, output=False)[1]
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
        output, saved = branch.run_again(source, not branch.first, ahead)
        if not branch.first:
            self._undo(branch, coupled, source, output)
        self._position -= 1
        return saved

    def _undo(self, branch: RebuiltBranch, coupled: Tensor, source: Tensor, output: Tensor) -> None:
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
