"""The backward of rebuilt blocks: a tape holds their branches in order, and rebuilds the streams from the last one down.

What a branch's replay returns inverts the coupling: ``x2 = y2 - g(y1)``. The tape may replay a branch ahead, while the
gradients of the branch behind it are computed (PaReprop, arXiv 2306.09342, in units of half blocks): gradients stay on the
stream of the forward, and the replay is on a second CUDA stream.
"""

from __future__ import annotations

import math
import warnings
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from holotrain.reversible.block_inputs import SavedTensors
from holotrain.reversible.checks import StreamCheck
from holotrain.reversible.context import backward_id, graph_is_retained, is_captured
from holotrain.reversible.coupling import Coupling
from holotrain.reversible.reads import is_tensor_parallel
from holotrain.reversible.recording import Recorded
from holotrain.reversible.side_stream import SameStream, SideStream, side_of


class OnTape(Recorded):
    """A branch on a tape, or one of its tiles.

    Attributes:
        place: on the tape.
        first: it belongs to the first branch: nobody needs the stream before it.
        crossed: its source is what the branch before it wrote; if not, it is that one's source.
        ahead: it may be replayed ahead of its turn.
    """

    coupling: Coupling
    place: int
    first: bool
    crossed: bool
    ahead: bool


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
            source, branch.saved[:] = self._rebuild_down_to(branch)
        self._current = branch, source
        if self._side is not None:
            self._run_ahead(self._side)

    def _rebuild_down_to(self, branch: OnTape) -> tuple[Tensor, list[Tensor]]:
        if self._position < branch.place:
            raise RuntimeError(
                f"the backward needs the activations of branch {branch.name} again after it went on to earlier branches, "
                "where they are released; call the backward before with retain_graph=True"
            )
        while self._position > branch.place:
            self._rebuild()
        return self._streams[1], self._rebuild()

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
            # Other processes would meet the branch's collectives in another order, and a graph would hold what was begun.
            if is_tensor_parallel(branch.module) or is_captured(streams[0].device):
                raise
            if not _no_room:
                warnings.warn(
                    "there is no memory to recompute one block beside the gradients of another; where this happens, blocks are "
                    "recomputed in turn from now on, in batches as large as this one",
                    stacklevel=2,
                )
            _no_room[branch.module] = size  # each attempt empties the allocator's cache, and waits for the device
            return  # put off until the memory of the branch behind it is free
        self._early = branch, saved, streams, done  # the streams too: the side stream reads them until ``done``
