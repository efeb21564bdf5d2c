"""Recomputation on saved-tensor hooks.

Plain autograd records every branch. What it would save is discarded, and the first tensor that the backward asks for has the
branch run again, which computes all of them. Autograd owns the graph. So closures, shared and frozen parameters, hooks, DDP,
FSDP2 and ``torch.autograd.grad`` work as they do without recomputation.

A checkpointed branch runs again from its stored input. A rebuilt branch runs again from the stream that the backward has
reached, and its output inverts the coupling: ``x2 = y2 - g(y1)``. A tape holds these branches in order. It may run a branch
ahead, while the gradients of the branch behind it are computed (PaReprop, arXiv 2306.09342, in units of half blocks): gradients
stay on the stream of the forward, and the recomputation is on a second CUDA stream.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache, partial
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from holotrain.reversible.block import Coupling, Run
from holotrain.reversible.drift import Witness
from holotrain.reversible.kept import Keeper
from holotrain.reversible.reads import Arguments, Reads, is_compiled, parts_of, require_unwrapped
from holotrain.reversible.replay import Call, Replay, in_trace, is_imagined, learned_of
from holotrain.reversible.schedules import Schedule

_no_room: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""Branches that found no memory to run ahead, and how many elements a stream had then."""

_kind_of, _version = attrgetter("shape", "dtype"), attrgetter("_version")


class Branch:
    """One run of a branch in the forward, which can be repeated.

    Args:
        name: name in a trace, such as 3.g.
        module: f or g.
        keywords: its keyword arguments.
        call: what all branches of the forward share.
        keep: results that are kept and not recomputed, as in :class:`~holotrain.reversible.kept.Keeper`.
        forward: what to call instead of the module, without the module's hooks.

    Raises:
        ValueError: the branch cannot be repeated.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        keywords: dict[str, Any],
        call: Call,
        keep: tuple[str, ...] = (),
        forward: Callable | None = None,
    ) -> None:
        parts = parts_of(module)
        require_unwrapped(parts if forward is None else parts[1:])
        self.name, self.module, self.call = name, module, call
        self._forward = forward or module
        self._keywords, self._arguments = keywords, Arguments(keywords) if keywords else None
        self._reads = Reads(parts)
        self.learned = learned_of(module, parts)
        self._replay = Replay(call, module, self.learned, self._arguments.generators if self._arguments else [])
        self._keeping: AbstractContextManager | None = None
        self.reusing: AbstractContextManager | None = None
        if keep:
            if is_compiled(parts):
                raise ValueError("keep does not work with compiled branches; do not compile f and g, or set keep=()")
            self._keeping, self.reusing = Keeper(keep)()
        # Shape and dtype of the tensors that autograd would have saved in the forward.
        self.kinds: list[tuple[torch.Size, torch.dtype]] = []
        # The leaves that the forward saved, also those that are no parameters of the module, and their versions.
        self._leaves: list[tuple[Tensor, int]] = []
        # What autograd saved in the latest recomputation; None where the backward has taken it.
        self.saved: list[Tensor | None] = []

    def run(self, source: Tensor, supply: Callable[[Branch], None]) -> Any:
        """The forward: returns the module's output, with a graph whose saved tensors are discarded.

        Args:
            supply: called in the backward to have the branch run again, so that ``saved`` is there.
        """
        version, saved, kinds = source._version, self.saved, self.kinds
        # The graph holds the hooks, and must not hold the stream through them. The parameters are looked after already.
        known = {id(source), *map(id, self._reads.tensors)}

        def pack(tensor: Tensor) -> int:
            kinds.append(_kind_of(tensor))
            if tensor.requires_grad and tensor.is_leaf and id(tensor) not in known:
                self._leaves.append((tensor, tensor._version))
            return len(kinds) - 1  # all that the graph keeps of the tensor

        def unpack(number: int) -> Tensor:
            if not saved or saved[number] is None:
                supply(self)
            tensor, saved[number] = saved[number], None  # activations go as they are used
            return tensor

        with self._replay.recorded(), saved_tensors_hooks(pack, unpack):
            if self._keeping is None:
                update = self._forward(source, **self._keywords)
            else:
                with self.call.uncached(), self._keeping:  # a cached cast would be one operation fewer
                    update = self._forward(source, **self._keywords)
        self._differentiable = source.requires_grad
        if source._version != version:
            raise ValueError(
                "a branch changed its input in place, so its block cannot be inverted; "
                "its first operation must return a new tensor (inplace=False)"
            )
        if self._arguments is not None:
            self._arguments.require_containers_unchanged(self._keywords)
            self._keywords = self._arguments.keywords()
        self._replay.settle()
        self._reads.settle()
        return update

    def run_again(self, source: Tensor, output: bool = True) -> tuple[Any, list[Tensor]]:
        """The recomputation: returns the output, detached, and the tensors that autograd saves.

        Args:
            output: False: the output may be None, because the branch stops when autograd has saved its last tensor. What comes
                after that is not done again. The first recomputation of a module, and modules with hooks, do not stop.

        Raises:
            RuntimeError: something that the branch reads has changed since the forward, or the branch does something else.
        """
        if self._arguments is not None:
            self._arguments.require_unchanged()
        packed: list[Tensor] = []
        pack, versions, verified = packed.append, [], self.learned.verified
        if not verified:  # later recomputations do as the first one, without this check

            def pack(tensor: Tensor) -> None:
                packed.append(tensor)
                versions.append(tensor._version)

        elif not output and not any(part._forward_hooks for part in self._reads.parts):  # hooks would not all run
            last = len(self.kinds)

            def pack(tensor: Tensor) -> None:
                if len(packed) < last:
                    packed.append(tensor)
                if len(packed) == last:  # an operation saves its inputs before it runs: its product is left out
                    raise _AllSaved

        update = None
        source, hooks = source.detach().requires_grad_(self._differentiable), saved_tensors_hooks(pack, _never)
        with in_trace("recompute", self.name), self._reads, self._replay:
            try:
                with hooks:
                    if self.reusing is None:
                        update = self._forward(source, **self._keywords)
                    else:
                        source = source.view_as(source)  # no leaf, as in the forward, since hooks on leaves add operations
                        with self.call.uncached(), self.reusing:  # entered last, because it counts every operation
                            update = self._forward(source, **self._keywords)
            except _AllSaved:
                pass
        saved = packed.copy()
        packed.clear()  # which their graph holds
        name = type(self.module).__name__
        if not verified and versions != [*map(_version, saved)]:
            raise RuntimeError(
                f"a tensor that {name} needs for its gradient was modified by an inplace operation after its use"
            )
        kinds = [*map(_kind_of, saved)]
        if kinds != self.kinds:
            different = next((pair for pair in zip(self.kinds, kinds, strict=False) if pair[0] != pair[1]), "others")
            raise RuntimeError(
                f"{name} saved {len(self.kinds)} tensors for its gradient in the forward and {len(kinds)} in the recomputation "
                f"({different}), so it did something else; its forward must do the same whenever it runs on the same input"
            )
        self.learned.verified = True
        if self._leaves and any(tensor._version != version for tensor, version in self._leaves):
            raise RuntimeError(
                f"a tensor that {name} reads, other than its parameters, was modified by an inplace operation between "
                "the forward and its recomputation in the backward"
            )
        update = update.detach() if isinstance(update, Tensor) else tree_map_only(Tensor, Tensor.detach, update)
        return update, saved


class _AllSaved(BaseException):
    """Ends a recomputation whose output is not needed. No Exception, because a branch may catch those."""


def _never(nothing: None) -> Tensor:
    raise RuntimeError("the graph of a recomputation was differentiated; f and g must not call backward")


class _Saver(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)


def _kept(*tensors: Tensor) -> Node:
    """A node whose ``saved_tensors`` are the tensors, or an error if they were changed in place.

    They are saved as autograd saves: an outer recomputation, in whose branch this one runs, discards and recomputes them.
    """
    return _Saver.apply(torch.empty(0, requires_grad=True), *(tensor.detach() for tensor in tensors)).grad_fn


class Checkpointing:
    """Runs branches whose inputs are stored and that are recomputed in the backward.

    Args:
        call: what all branches of the forward share.
    """

    def __init__(self, call: Call) -> None:
        self._call = call

    def block(self, number: int, schedule: Schedule, coupling: Coupling, forward: Callable | None = None) -> Run:
        """As :meth:`Tape.block`."""

        def run(name: str, module: nn.Module, target: Tensor, source: Tensor, keywords: dict) -> Tensor:
            branch = Branch(f"{number}.{name}", module, keywords, self._call, (), forward)
            return coupling.couple(target, source, _checkpointed(branch, coupling.read(source)))

        return run

    def end(self, y1: Tensor, y2: Tensor) -> None:
        """After the last block."""


def checkpointed(module: nn.Module, x: Tensor, *, name: str | None = None, **keywords: Any) -> Any:
    """``module(x, **keywords)``, which keeps ``x`` alone and is recomputed in the backward.

    Args:
        name: in a trace; None: the module's class.
    """
    if torch.compiler.is_compiling():  # the compiler checkpoints by rules of its own
        return checkpoint(module, x, use_reentrant=False, **keywords)
    call = Call(x.device)
    output = _checkpointed(Branch(name or type(module).__name__, module, keywords, call), x)
    call.end()
    return output


def _checkpointed(branch: Branch, source: Tensor) -> Any:
    return branch.run(source, partial(_supply_from, _kept(source)))


def _supply_from(stored: Node, branch: Branch) -> None:
    with torch.inference_mode(False):  # a backward may be called in it
        branch.saved[:] = branch.run_again(*stored.saved_tensors, output=False)[1]


class SideStream:
    """A second CUDA stream, on which recomputations run ahead. On the host nothing waits.

    The two streams share tensors without ``record_stream``. The host lets go of what one stream reads only after the other has
    waited for it, so that the memory can be used again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def run(self, work: Callable[[], None]) -> torch.cuda.Event:
        """Runs the work after all that was begun so far; returns what to wait for."""
        main = torch.cuda.current_stream(self._device)
        side = _side_stream(self._device, main.cuda_stream)
        side.wait_stream(main)
        try:
            with torch.cuda.stream(side):
                work()
        except BaseException:
            main.wait_stream(side)  # for what it had begun
            raise
        return side.record_event()

    def wait(self, done: torch.cuda.Event) -> None:
        """Makes all work that is submitted from now on wait."""
        torch.cuda.current_stream(self._device).wait_event(done)


@cache
def _side_stream(device: torch.device, main: int) -> torch.cuda.Stream:
    """One for every main stream, so that a sequence within a branch of another has a side of its own."""
    return torch.cuda.Stream(device)


class _SameStream:
    def run(self, work: Callable[[], None]) -> None:
        work()

    def wait(self, done: None) -> None:
        pass


_imagined_side: ContextVar[bool] = ContextVar("side stream imagined", default=False)


@contextmanager
def imagining_a_side_stream() -> Iterator[None]:
    """Inside, tensors without values are recomputed as early as a CUDA device would, so that a memory plan counts them."""
    token = _imagined_side.set(True)
    try:
        yield
    finally:
        _imagined_side.reset(token)


def side_of(stream: Tensor) -> SideStream | _SameStream | None:
    """Where the recomputation of a stream's branches may run ahead; None: nowhere, since a CPU has no second queue of work."""
    if is_imagined(stream):
        return _SameStream() if _imagined_side.get() else None
    return SideStream(stream.device) if stream.is_cuda else None


class _Rebuilt(Branch):
    """A branch on a tape, the ``place``-th; ``ahead``: it may run ahead of its turn."""

    coupling: Coupling
    place: int
    ahead: bool
    crossed: bool
    """Whether its source is what the branch before it wrote; if not, it is that one's source."""


class Tape:
    """Runs consecutive branches whose inputs are rebuilt in the backward, and holds them.

    The graph holds the tape, and the tape never the graph. Only the streams after the last branch are kept from the forward.

    Args:
        call: what all branches of the forward share.
        x1, x2: the streams before the first branch.
        witness: compares the rebuilt inputs with the true ones.
    """

    def __init__(self, call: Call, x1: Tensor, x2: Tensor, witness: Witness | None = None) -> None:
        self._call, self._witness = call, witness
        self._branches: list[_Rebuilt] = []
        # Forward: the streams after the latest branch, (coupled, source).
        # Backward: those after ``_branches[_position]``, the next to be rebuilt.
        self._streams: tuple[Tensor, Tensor] | None
        self._leave(x1, x2, x2.detach())
        if witness is not None:
            witness.remember(x1, x2)
        self._position: int | None = None
        self._end: Node | None = None
        self._task = -1
        self._current: tuple[_Rebuilt, Tensor] | None = None
        self._early: tuple[_Rebuilt, list[Tensor], tuple[Tensor, Tensor], Any] | None = None

    # forward

    def block(self, number: int, schedule: Schedule, coupling: Coupling, forward: Callable | None = None) -> Run:
        """How to run the branches of the next block.

        Args:
            number: for a trace.
            coupling: of its streams.
            forward: what to call instead of the branch, without the branch's hooks.
        """

        def run(name: str, module: nn.Module, target: Tensor, source: Tensor, keywords: dict) -> Tensor:
            streams = self._streams
            crossed = self._enter(source, target)
            branch = _Rebuilt(f"{number}.{name}", module, keywords, self._call, schedule.keep, forward)
            branch.coupling, branch.crossed = coupling, crossed
            branch.place, branch.ahead = len(self._branches), schedule.ahead
            coupled = coupling.couple(target, source, branch.run(coupling.read(source), self._supply))
            self._branches.append(branch)
            self._leave(coupled, source, streams[0 if crossed else 1])
            return coupled

        return run

    def _leave(self, coupled: Tensor, source: Tensor, source_alone: Tensor) -> None:
        # Without their graph, which holds the tape: a forward that does not end must not leave the two to hold each other.
        self._streams, self._left = (coupled.detach(), source_alone), (ref(coupled), ref(source))
        self._versions = coupled._version, source._version

    def _enter(self, first: Tensor, second: Tensor) -> bool:
        """Whether the tensors are the streams as they were left, (coupled, source); False if the other way round.

        Raises:
            ValueError: they are not, so a hook replaced or changed them.
        """
        (coupled, source), streams, self._streams = self._left, self._streams, None
        crossed = first is coupled() or (first is not source() and same_tensor(first, streams[0]))
        pair = (first, second) if crossed else (second, first)
        if not ((pair[0] is coupled() and pair[1] is source()) or all(map(same_tensor, pair, streams))):
            raise ValueError(
                "something replaced the inputs or outputs of a ReversibleBlock (a hook, or fully_shard with a "
                "MixedPrecisionPolicy, which casts the streams: set cast_forward_inputs=False and no output_dtype, and train "
                'under torch.autocast), so the block cannot be rebuilt; use backward="autograd" or "checkpoint"'
            )
        if (streams[0]._version, streams[1]._version) != self._versions:
            raise ValueError(
                "something changed the inputs or outputs of a ReversibleBlock in place (a hook), so the block cannot be "
                'rebuilt; use backward="autograd" or "checkpoint"'
            )
        return crossed

    def end(self, y1: Tensor, y2: Tensor) -> None:
        """After the last block, with what it returned."""
        coupled, source = self._streams
        self._enter(y1, y2)
        self._end, self._position = _kept(coupled, source), len(self._branches) - 1

    # backward

    def _supply(self, branch: _Rebuilt) -> None:
        """Has ``branch.saved`` filled: rebuilds the streams down to the branch."""
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled():  # as a backward may be called
            with torch.inference_mode(False), torch.no_grad():
                self._rebuild_to(branch)
        else:
            self._rebuild_to(branch)

    def _rebuild_to(self, branch: _Rebuilt) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task or task == -1:  # -1: no backward, but a look at what a node saved
            self._begin(task)
        if self._current is not None:
            current, source = self._current
            if branch is current:  # a function reads its ctx.saved_tensors a second time
                branch.saved[:] = branch.run_again(branch.coupling.read(source), output=False)[1]
                return
            current.saved.clear()
        early, self._early = self._early, None
        if early is not None:
            self._side.wait(early[-1])
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
        self._run_ahead()

    def _begin(self, task: int) -> None:
        if self._position is None:
            raise RuntimeError("the backward reached reversible blocks of which the model did not run all")
        self._task = task
        if self._end is None:
            return  # an earlier backward, which did not retain the graph, has advanced the tape to here
        for branch in self._branches:
            branch.saved.clear()
        self._streams, self._position = self._end.saved_tensors, len(self._branches) - 1
        self._current, self._early = None, None
        self._side = side_of(self._streams[0])
        if task != -1 and not torch._C._autograd._get_current_graph_task_keep_graph():
            self._end = None

    def _rebuild(self) -> list[Tensor]:
        """Runs the next branch again and inverts its coupling; returns what it saved."""
        branch, (coupled, source) = self._branches[self._position], self._streams
        inverted = branch.place > 0 or self._witness is not None
        output, saved = branch.run_again(branch.coupling.read(source), output=inverted)
        if inverted:
            target = branch.coupling.undo(coupled, source, output)
            if branch.place == 0:
                self._witness.compare(target, source)
            self._streams = (source, target) if branch.crossed else (target, source)
        self._position -= 1
        return saved

    def _run_ahead(self) -> None:
        """Runs the next branch, if it may run ahead.

        The side stream waits for the main one first. So the main one has let go of what it used of the side's memory.
        """
        if self._side is None or self._position < 0:
            return
        branch, streams, saved = self._branches[self._position], self._streams, []
        size = streams[0].numel()
        # Nobody would wait for a branch without gradient.
        if not branch.ahead or not branch.kinds or size >= _no_room.get(branch.module, math.inf):
            return
        try:
            done = self._side.run(lambda: saved.extend(self._rebuild()))
        except torch.OutOfMemoryError:
            if branch.reusing is not None or _is_tensor_parallel(branch.module):
                raise  # what was kept can be reused once; other processes would meet the branch's collectives in another order
            if not _no_room:
                warnings.warn(
                    "there is no memory to recompute one block beside the gradients of another; where this happens, blocks are "
                    "recomputed in turn from now on, in batches as large as this one",
                    stacklevel=2,
                )
            _no_room[branch.module] = size  # each attempt empties the allocator's cache, and waits for the device
            return  # put off until the memory of the branch behind it is free
        self._early = branch, saved, streams, done  # the streams too: the side stream reads them until ``done``


def _is_tensor_parallel(module: nn.Module) -> bool:
    """Whether several processes hold the module's parameters."""
    tensor = sys.modules.get("torch.distributed.tensor")  # without it there is no DTensor, and importing it takes time
    return tensor is not None and any(isinstance(parameter, tensor.DTensor) for parameter in module.parameters())


def same_tensor(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are views of the same elements in the same order."""
    same_view = a.shape == b.shape and a.stride() == b.stride() and a.storage_offset() == b.storage_offset()
    return same_view and a.dtype == b.dtype and a.untyped_storage()._cdata == b.untyped_storage()._cdata
