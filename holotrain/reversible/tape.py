"""Consecutive branches whose inputs are rebuilt in the backward.

A rebuilt branch runs again from the stream that the backward has reached, and its output inverts the coupling: ``x2 = y2 -
g(y1)``. A tape holds these branches in order. It may run a branch ahead, while the gradients of the branch behind it are
computed (PaReprop, arXiv 2306.09342, in units of half blocks): gradients stay on the stream of the forward, and the
recomputation is on a second CUDA stream.
"""

from __future__ import annotations

import math
import warnings
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from holotrain.reversible.block import Coupling
from holotrain.reversible.checks import StreamCheck
from holotrain.reversible.context import backward_id, graph_is_retained
from holotrain.reversible.kept_inputs import Saved
from holotrain.reversible.reads import is_tensor_parallel
from holotrain.reversible.recomputation import Branch
from holotrain.reversible.side_stream import SameStream, SideStream, side_of

_no_room: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""Branches that found no memory to run ahead, and how many elements a stream had then."""


class RebuiltBranch(Branch):
    """A branch on a tape, or one of its tiles, the ``place``-th; ``ahead``: it may run ahead of its turn."""

    coupling: Coupling
    place: int
    ahead: bool
    first: bool
    """Whether it is of the first branch, whose target nobody needs."""
    crossed: bool
    """Whether its source is what the branch before it wrote; if not, it is that one's source."""


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
        self._complete, self._position = False, -1
        self._is_read = True  # a branch reads the coupled stream itself, and may still need it
        self._end: Saved | None = None
        self._task = -1
        self._current: tuple[RebuiltBranch, Tensor] | None = None
        self._early: tuple[RebuiltBranch, list[Tensor], tuple[Tensor, ...], Any] | None = None

    def complete(self, target: Tensor, source: Tensor) -> None:
        """At the end of the forward, with the streams of the last branch."""
        self._end, self._complete = Saved(target, source), True

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
                branch.saved[:] = branch.run_again(branch.coupling.read(source), output=False)[1]
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
        if not self._complete:
            self.branches[-1].coupling.reached()
        if not self._complete:
            raise RuntimeError(
                "the backward reached reversible blocks of which the model did not run all, or whose last stream it changed "
                "in place"
            )
        self._task = task
        if self._end is None:
            return  # an earlier backward, which did not retain the graph, has advanced the tape to here
        for branch in self.branches:
            branch.saved.clear()
        self._streams, self._position = self._end.tensors(), len(self.branches) - 1
        self._current, self._early, self._target, self._is_read = None, None, None, True
        self._side = side_of(self._streams[0])
        if not graph_is_retained():
            self._end = None

    def _rebuild(self, ahead: bool = False) -> list[Tensor]:
        """Runs the next branch again and inverts its coupling; returns what it saved."""
        branch, (coupled, source) = self.branches[self._position], self._streams
        if branch.place == 0 and self.check is not None:
            self.check.compare(source, coupled)
        read = branch.coupling.read(source)
        output, saved = branch.run_again(read, not branch.first, ahead)
        # The streams of the last branch, and what it read, are needed again if the graph stays.
        kept = len(self.branches) - (1 if self._end is None else 2)
        last_use = not (ahead or self._is_read) and self._position < kept
        self._is_read = read is source
        if not branch.first:
            self._undo(branch, coupled, source, output, last_use)
        self._position -= 1
        return saved

    def _undo(self, branch: RebuiltBranch, coupled: Tensor, source: Tensor, output: Any, last_use: bool) -> None:
        """Inverts the coupling of a branch or of a tile; the first tile, which comes last, completes that of its branch."""
        target = branch.coupling.undo(branch.part(coupled), branch.part(source), output, last_use)
        if branch.tiled:
            self._target = torch.empty_like(coupled) if self._target is None else self._target
            branch.part(self._target).copy_(target)
            target = self._target
        if branch.begins:
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
