"""The forward of blocks whose branches are recomputed: runs each branch, and records what the backward needs.

:class:`Recorder` gives a checkpointed branch its stored input, and puts a rebuilt one on a tape
(:mod:`holotrain.reversible.tape`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from holotrain.reversible.backward_schedules import Casts, Schedule
from holotrain.reversible.block import Coupling
from holotrain.reversible.checks import RebuildChecks
from holotrain.reversible.context import has_no_data
from holotrain.reversible.random_state import in_graphed_step
from holotrain.reversible.reads import is_sharded
from holotrain.reversible.recomputation import Branch, from_stored
from holotrain.reversible.replay import Call
from holotrain.reversible.tape import RebuiltBranch, Tape
from holotrain.reversible.tokenwise import drops_samples, tiles_of


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
        forward: Callable | None = None,
    ) -> None:
        """Before the next block.

        Args:
            number: for a trace.
            streams: before the block.
            forward: what to call instead of the branch, without the branch's hooks.
        """
        if schedule.kind != "rebuilt":
            self._end_tape(*streams)
        elif self._tape is None:
            self._begin_tape(*streams)
        if schedule.kind == "stored":
            self.call.present = None  # a stored block may draw random numbers
        self._number, self._schedule, self._coupling, self._forward = number, schedule, coupling, forward
        self._ahead = schedule.ahead and not is_sharded(type(block))

    def update(self, name: str, module: nn.Module, target: Tensor, source: Tensor, keywords: dict) -> Tensor:
        """Runs a branch of the block on the source, and updates the target with its output."""
        if self._schedule.kind == "stored":
            return self._coupling.update(name, self._forward or module, target, source, keywords)
        update = self._checkpointed if self._tape is None else self._rebuilt
        return update(f"{self._number}.{name}", module, target, source, keywords)

    def _checkpointed(self, name: str, module: nn.Module, target: Tensor, source: Tensor, keywords: dict) -> Tensor:
        read, outputs, kept_as = self._coupling.read(source), [], self._schedule.input
        size = self._tile if kept_as == "checkpoint" else None  # each tile would fetch or restore the whole
        for tile, part, casts in self._tiles_of(module, size, read, keywords):
            branch = Branch(name, module, keywords, self.call, (), self._forward, tile, casts)
            outputs.append(from_stored(branch, read, kept_as, part))
        return self._coupling.couple(target, source, _joined(outputs))

    def _rebuilt(self, name: str, module: nn.Module, target: Tensor, source: Tensor, keywords: dict) -> Tensor:
        coupling, tape = self._coupling, cast(Tape, self._tape)
        crossed = self._has_crossed(source, target)
        if self._halves == 1 and not has_no_data(source):  # one branch has nothing rebuilt before it
            tape.check = self._checks.of_blocks(self._streams[1], coupling.grid)
        read, outputs = coupling.read(source), []
        for tile, part, casts in self._tiles_of(module, self._tile, read, keywords):
            branch = RebuiltBranch(name, module, keywords, self.call, self._schedule.keep, self._forward, tile, casts)
            branch.coupling, branch.crossed, branch.place, branch.ahead = coupling, crossed, len(tape.branches), self._ahead
            branch.first = self._halves == 0
            outputs.append(branch.run(part, tape.supply))
            tape.branches.append(branch)
        coupled = coupling.couple(target, source, _joined(outputs))
        self._halves += 1
        self._streams, self._versions = (coupled, source), (coupled._version, source._version)
        return coupled

    def _tiles_of(
        self, module: nn.Module, size: int | None, read: Tensor, keywords: dict
    ) -> Iterator[tuple[slice | None, Tensor, Casts | None]]:
        """The tiles of a branch: their tokens, what they read, and what they share. One of None: all tokens."""
        tiles = tiles_of(module, size, read, keywords)
        drops_alike = bool(tiles) and drops_samples(module)
        if not tiles or (drops_alike and in_graphed_step()):
            yield None, read, None
            return
        casts = Casts() if self.call.settings.casts_weights else None
        states = self.call.states() if drops_alike else []
        parts = torch.unsafe_split(read, cast(int, size), 1)  # no views: what a branch writes to its part is noticed
        for tile, part in zip(tiles, parts, strict=True):
            if drops_alike:
                self.call.draw_again(states)
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
        """After the last block, with what it returned."""
        self._end_tape(y1, y2)

    def _begin_tape(self, x1: Tensor, x2: Tensor) -> None:
        if x1.dtype.itemsize < 4:
            warnings.warn(
                f"streams of {x1.dtype} are rounded at every addition, so rebuilt activations and gradients are inexact (by up "
                "to 0.3 after 96 blocks); keep the streams in fp32 and train under torch.autocast",
                stacklevel=5,
            )
        self._halves = 0  # branches on the tape, each with all its tiles
        self._tape, self._streams, self._versions = Tape(), (x1, x2), (x1._version, x2._version)

    def _end_tape(self, y1: Tensor, y2: Tensor) -> None:
        if self._tape is not None:
            self._has_crossed(y1, y2)
            self._tape.complete(*self._streams)
            self._tape = None


def _joined(outputs: list) -> Any:
    """What a branch returned, from its tiles; without tiles it may be no tensor."""
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


def same_tensor(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are views of the same elements in the same order."""
    same_view = a.shape == b.shape and a.stride() == b.stride() and a.storage_offset() == b.storage_offset()
    return bool(same_view and a.dtype == b.dtype and a.untyped_storage()._cdata == b.untyped_storage()._cdata)
