"""A branch runs in the forward, and again in the backward.

Plain autograd records every branch. What it would save is discarded, and the first tensor that the backward asks for has the
branch run again, which computes all of them. Autograd owns the graph. So closures, shared and frozen parameters, hooks, DDP,
FSDP2 and ``torch.autograd.grad`` work as they do without recomputation.

Read downwards: :meth:`Recorded.run` in the forward, :meth:`Recorded.replay` in the backward, and what is compared in between.
Where the input of a replay comes from is the schedule's matter (:mod:`holotrain.reversible.schedule`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from operator import attrgetter
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._C._autograd import _pop_saved_tensors_default_hooks as _pop_hooks
from torch._C._autograd import _push_saved_tensors_default_hooks as _push_hooks
from torch.autograd import profiler
from torch.utils._pytree import tree_map_only

from holotrain.numeric import counted
from holotrain.reversible.context import fake_mode_active, graph_is_retained, in_recomputation, in_trace
from holotrain.reversible.fused import CannotFuse, Found, Fused, compiled_gradients, is_fused, reads_others
from holotrain.reversible.graph_generators import next_pair
from holotrain.reversible.kept_results import Casts, KeptResults
from holotrain.reversible.reads import Arguments, Reads, is_compiled, parts_of, require_unwrapped
from holotrain.reversible.settings import Call, Draws, generators_among, one_convolution, python_generators_among

_kind_of = attrgetter("shape", "dtype")


class History:
    """What the runs of a branch have shown so far. It holds no module, so that a branch can go.

    Attributes:
        generators: of torch, that it and its submodules hold.
        python_generators: of Python and NumPy.
        verified: a replay was compared with the forward in full.
        fused: replays may be fused with their gradients.
        runs: their number.
        kinds: shapes and dtypes of what its latest run saved.
        places: those of them that are leaves, or views or casts of leaves.
    """

    def __init__(self, parts: list[nn.Module]) -> None:
        attributes = [value for part in parts for value in vars(part).values()]
        self.generators, self.python_generators = generators_among(attributes), python_generators_among(attributes)
        self.verified, self.fused, self.runs = False, True, 0
        self.kinds: list[tuple[torch.Size, torch.dtype]] = []
        self.places: list[int] = []


class _Saved:
    """What autograd would save in a run. It is noted at once and not held, for the run would hold its activations.

    Args:
        known: what the module holds, by address.

    Attributes:
        kinds: as of :class:`History`.
        own: the address of each tensor that the module holds; else None.
        leaves: leaves, and those of which views or casts were saved, with their places.
    """

    def __init__(self, history: History, known: dict[int, int]) -> None:
        self._before, self._places, self._known = history.kinds, frozenset(history.places), known
        self.kinds: list[tuple[torch.Size, torch.dtype]] = []
        self.own: list[int | None] = []
        self.leaves: list[tuple[int, Tensor]] = []

    def pack(self, tensor: Tensor) -> int:
        """All that the graph keeps of a tensor: its place."""
        place, kind = len(self.kinds), _kind_of(tensor)
        self.kinds.append(kind)
        self.own.append(self._known.get(id(tensor)))
        # Where a run before saved the same kind, leaves are at the same places, or at fewer.
        unlike = place >= len(self._before) or self._before[place] != kind
        if (unlike or place in self._places) and (leaf := _leaf_of(tensor)) is not None:
            self.leaves.append((place, leaf))
        return place

    def clear(self) -> None:
        self.kinds, self.own, self.leaves = [], [], []


_histories: WeakKeyDictionary[nn.Module, History] = WeakKeyDictionary()


class Recorded:
    """One run of a branch in the forward, which can be replayed.

    Args:
        name: name in a trace, such as 3.g.
        module: f or g, or a block that runs again.
        keywords: its keyword arguments.
        call: what all branches of the forward share.
        keep: results that are kept and not recomputed, as in :class:`~holotrain.reversible.kept_results.KeptResults`.
        forward: what to call instead of the module, without the module's hooks.
        tile: the tokens that it takes of a stream (B, T, ...); None: all.
        casts: shared with the other tiles.

    Attributes:
        kinds: shape and dtype of each tensor that autograd would have saved.
        saved: what autograd saved in the latest replay; None where the backward has taken it.
        fused: a replay computes the gradients, and saves them.

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
        tile: slice | None = None,
        casts: Casts | None = None,
    ) -> None:
        parts = parts_of(module)
        if call.distributed:
            require_unwrapped(frozenset(map(type, parts if forward is None else parts[1:])))
        if keep and any(map(is_compiled, parts)):
            raise ValueError("keep does not work with compiled branches; do not compile f and g, or set keep=()")
        self.name, self.module, self.call, self.tile = name, module, call, tile
        self.kinds: list[tuple[torch.Size, torch.dtype]] = []
        self.saved: list[Tensor | None] = []
        self._forward, self._arguments = forward or module, Arguments(keywords)
        self._history = history = _histories.get(module) or _histories.setdefault(module, History(parts))
        fuses = is_fused(module) and forward is None and history.verified and history.fused
        # Attributes take 20 us, so not in each run, but in a fused one nothing else tells that other parameters are read.
        self._reads = Reads(parts, fuses or history.runs & (history.runs + 1) == 0)
        leaves = self._arguments.leaves
        python = None if history.verified else history.python_generators + python_generators_among(leaves)
        self._draws = Draws(call, history.generators + generators_among(leaves), python)
        self._pair = next_pair(call.device) if call.on_gpu else None
        self._kept, self._casts = KeptResults(keep) if keep else None, casts
        # Among what was saved: what the module holds, by address (else None); views and casts of parameters (place, address).
        self._own: list[int | None] = []
        self._derived: list[tuple[int, int]] = []
        # Other leaves that were saved, and their versions.
        self._leaves: list[tuple[Tensor, int]] = []
        self.fused = fuses and self._may_be_fused()
        self._trained: dict[str, Tensor] = {}
        self._gradient: Tensor | None = None  # of the output, for a replay that is fused with the gradients
        history.runs += 1

    def _may_be_fused(self) -> bool:
        """Whether nothing in the branch but its compiled computation matters in this run."""
        among = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in self._arguments.leaves)
        return not among and not self._reads.hooked and not fake_mode_active()

    def run(self, source: Tensor, supply: Callable[[Self], None]) -> Any:
        """The forward: returns the module's output, with a graph whose saved tensors are discarded.

        Args:
            supply: called in the backward to have the branch replayed, so that ``saved`` is there.

        Raises:
            ValueError: the branch changes its input in place, or an argument.
        """
        if self.fused:
            try:
                return self._run_fused(source, supply)
            except CannotFuse:
                self._draws.take_back()
                self.fused = self._history.fused = False
        version, saved, noted = source._version, self.saved, _Saved(self._history, self._reads.addresses)

        def unpack(place: int) -> Any:
            if not saved or saved[place] is None:
                supply(self)
            tensor, saved[place] = saved[place], None  # activations go as they are used
            return tensor

        around: list[AbstractContextManager] = [self._repeatable()] if self.call.on_gpu else []
        if self._kept is not None:
            around.append(self._kept.keeping())
        try:
            output = within(around, self._called, source, noted.pack, unpack)
            _require_unwritten(source, version)
            if is_fused(self.module) and not self._history.verified and isinstance(output, Tensor):
                arguments = [leaf for leaf in self._arguments.leaves if isinstance(leaf, Tensor)]
                self._history.fused &= not reads_others(output, [source, *self._reads.tensors, *arguments])
            self._settle(source, noted)
        finally:
            noted.clear()  # which the graph holds
        return output

    def _run_fused(self, source: Tensor, supply: Callable[[Self], None]) -> Any:
        """The forward without a graph. A replay computes the gradients, in place of what autograd saves."""
        self._trained = {name: each for name, each in self.module.named_parameters() if each.requires_grad}
        output = Fused.apply(self, supply, source, *self._trained.values())
        self._settle(source, None)
        return output

    def run_alone(self, source: Tensor) -> Any:
        """Calls the module for :class:`~holotrain.reversible.fused.Fused`, without a graph.

        Raises:
            CannotFuse: it has drawn random numbers, which code that is compiled as another graph would draw otherwise, or has
                not returned one tensor.
        """
        version = source._version
        output = within([self._repeatable()] if self.call.on_gpu else [], self._forward, source, **self._arguments.keywords)
        _require_unwritten(source, version)
        if self._draws.have_moved() or not isinstance(output, Tensor):
            raise CannotFuse
        return output

    def gradients(self, gradient: Tensor, supply: Callable[[Self], None]) -> list[Tensor | None]:
        """Those of the source and of the parameters that are trained, for the gradient of what the module returned."""
        self._gradient = gradient
        supply(self)
        found = self.saved.copy()
        self.saved.clear()
        return found

    def _settle(self, source: Tensor, noted: _Saved | None) -> None:
        """After the forward: notes what it read and what autograd would have saved."""
        self._differentiable = source.requires_grad
        self._arguments.settle()
        self.call.settle(first=not self._history.verified)
        self._settings = self.call.settings  # earlier branches keep theirs
        self._draws.settle()
        self._reads.settle()
        if noted is not None:
            self._note(source, noted)
        if self._kept is not None:
            self._kept.settle(needed=bool(self.kinds))

    def _note(self, source: Tensor, noted: _Saved) -> None:
        """Notes what autograd would have saved: kinds, and leaves. Most runs save the same, and share one list."""
        history, addresses = self._history, self._reads.addresses
        if noted.kinds != history.kinds:
            history.kinds = noted.kinds.copy()
        history.places = [place for place, _ in noted.leaves]
        self.kinds, self._own = history.kinds, [*map(addresses.get, noted.own)]
        for place, leaf in noted.leaves:
            if self._own[place] is not None or leaf is source:
                continue
            if id(leaf) in addresses or isinstance(leaf, nn.Parameter):
                self._derived.append((place, id(leaf)))
            if id(leaf) not in addresses:
                self._leaves.append((leaf, leaf._version))

    def replay(self, source: Tensor, output: bool = True, ahead: bool = False) -> tuple[Any, list[Tensor]]:
        """Runs the branch again: returns the output, detached, and the tensors that autograd saves.

        Args:
            source: the stream; a tile takes its part.
            output: False: the output may be None, because the branch stops when autograd has saved its last tensor. What comes
                after that is not done again. The first replay of a module, and modules with hooks, do not stop.
            ahead: what it reuses stays until :meth:`release`.

        Raises:
            RuntimeError: something that the branch reads has changed since the forward, or the branch does something else.
        """
        if self.fused:
            return self._as_then(ahead, self._again_fused, source, output)
        history, packed = self._history, []
        pack, versions, verified = packed.append, [], history.verified
        if not verified:  # later replays do as the first one, without this check

            def pack(tensor: Tensor) -> None:
                packed.append(tensor)
                versions.append(tensor._version)

        elif not output and not self._reads.hooked:  # hooks would not all run
            last = len(self.kinds)

            def pack(tensor: Tensor) -> None:
                if len(packed) < last:
                    packed.append(tensor)
                if len(packed) == last:  # an operation saves its inputs before it runs: its product is left out
                    raise _AllSaved

        result = self._as_then(ahead, self._called, source, pack, _never)
        if self._casts is not None and self.tile is not None and self.tile.start == 0:
            self._casts.release()
        saved = packed.copy()
        packed.clear()  # which their graph holds
        if not verified and versions != [tensor._version for tensor in saved]:
            raise RuntimeError(f"a tensor that {type(self.module).__name__} needs for its gradient {_MODIFIED} after its use")
        self._require_same(saved)
        if not verified:
            self._draws.require_same(self.name)  # a later replay may stop before the last draw
            history.verified = True
        return result.detach() if isinstance(result, Tensor) else tree_map_only(Tensor, Tensor.detach, result), saved

    def _as_then(self, ahead: bool, call: Callable, source: Tensor, *arguments: Any) -> Any:
        """Calls something on the source, with all as it was before the forward; None if the branch has been stopped."""
        if self.tile is not None:
            source = source[:, self.tile].contiguous()
        around = self._contexts_of_replay(ahead)
        token, grad_mode = in_recomputation.set(True), torch.is_grad_enabled()
        try:
            self._arguments.require_unchanged()
            self._reads.begin()
            self._draws.begin()
            torch._C._set_grad_enabled(True)  # private: what torch.set_grad_enabled calls, without an object
            return within(around, call, source.detach().requires_grad_(self._differentiable), *arguments)
        except _AllSaved:
            return None
        finally:
            torch._C._set_grad_enabled(grad_mode)
            self._draws.end()
            in_recomputation.reset(token)
            self._reads.end()

    def _called(self, source: Tensor, pack: Callable, unpack: Callable) -> Any:
        """Calls the module under saved-tensor hooks."""
        # Private: the context manager saved_tensors_hooks calls the same, but its own calls take time where blocks are tiny.
        _push_hooks(pack, unpack)
        try:
            return self._forward(source, **self._arguments.keywords)
        finally:
            _pop_hooks()

    def _again_fused(self, source: Tensor, output: bool) -> Found:
        """What the module returns, if asked for, and the gradients, if there is one of the output."""
        keywords, gradient, self._gradient = self._arguments.keywords, self._gradient, None
        if gradient is None:
            with torch.no_grad():
                return self._forward(source, **keywords) if output else None, ()
        found, fused = compiled_gradients(self.module, self._trained, source, gradient, keywords, self._differentiable, output)
        self._history.fused &= fused
        return found

    def _contexts_of_replay(self, ahead: bool) -> list[AbstractContextManager]:
        around: list[AbstractContextManager] = []
        if profiler._is_profiler_enabled:
            around.append(in_trace("recompute", self.name))
        if self._settings is not self.call.settings or not self.call.is_unchanged():
            around.append(self._settings.reinstated(self._settings.cached))
        if self.call.on_gpu:
            around.append(self._repeatable(replay=True))
        if self._kept is not None:
            around.append(self._kept.reusing(self._reads.storages(), ahead or graph_is_retained()))
        if self._casts is not None:
            around.append(self._casts.shared(self._reads.storages()))
        return around

    @contextmanager
    def _repeatable(self, replay: bool = False) -> Generator[None]:
        """The context in which the branch runs on a GPU."""
        pair = self._pair
        own = nullcontext() if pair is None else pair.used(pair.recomputation if replay else pair.forward)
        with one_convolution(), own:
            yield

    def _require_same(self, saved: list[Tensor]) -> None:
        """
        Raises:
            RuntimeError: the replay saved other tensors than the forward, or of other leaves, or a leaf has changed.
        """
        kinds, name = [*map(_kind_of, saved)], type(self.module).__name__
        if kinds != self.kinds:
            different = next((pair for pair in zip(self.kinds, kinds, strict=False) if pair[0] != pair[1]), "others")
            raise RuntimeError(
                f"{name} saved {counted(len(self.kinds), 'tensor')} for its gradient in the forward and {len(kinds)} in the "
                f"recomputation ({different}), so it did something else; its forward must do the same whenever it runs on the "
                "same input, also if a list that it appends to has been cleared"
            )
        own = [*map(self._reads.addresses.get, map(id, saved))]
        if own != self._own or any(id(_leaf_of(saved[place])) != leaf for place, leaf in self._derived):
            raise RuntimeError(
                f"{name} read other parameters in the recomputation than in the forward, such as those of another adapter; "
                "change what is active after the backward"
            )
        if any(leaf._version != version for leaf, version in self._leaves):
            raise RuntimeError(
                f"a tensor that {name} reads, other than its parameters, {_MODIFIED} between the forward and its recomputation "
                "in the backward"
            )

    def release(self) -> None:
        """After a replay that ran ahead: lets go of the results that were kept for it, unless the graph stays."""
        if self._kept is not None and not graph_is_retained():
            self._kept.release()


def within(contexts: list[AbstractContextManager], call: Callable, *arguments: Any, **keywords: Any) -> Any:
    """Calls something in some contexts."""
    if not contexts:
        return call(*arguments, **keywords)
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        return call(*arguments, **keywords)


def _require_unwritten(source: Tensor, version: int) -> None:
    if source._version != version:
        raise ValueError(
            "a branch changed its input in place, so its block cannot be inverted; "
            "its first operation must return a new tensor (inplace=False)"
        )


_MODIFIED = "was modified by an inplace operation"

_SAME_WEIGHT = {"ToCopyBackward0", "TBackward0", "TransposeBackward0"}
"""What autocast and a product do to a weight before they save it."""


def _leaf_of(tensor: Tensor) -> Tensor | None:
    """The leaf with a gradient that a tensor is, or of which it is a view or a cast; also a parameter without, if a view."""
    base = tensor._base
    if not tensor.requires_grad:
        return base if isinstance(base, nn.Parameter) else None
    leaf = tensor if tensor.is_leaf else base
    if leaf is not None and leaf.is_leaf:
        return leaf
    node = tensor.grad_fn  # makes an object for Python, which takes longer than the rest
    while node is not None and node.name() in _SAME_WEIGHT:
        node = node.next_functions[0][0]
    return getattr(node, "variable", None)


class _AllSaved(BaseException):
    """Ends a replay whose output is not needed. No Exception, because a branch may catch those."""


def _never(nothing: None) -> Tensor:
    raise RuntimeError("the graph of a recomputation was differentiated; f and g must not call backward")
