"""Recomputation on saved-tensor hooks.

Plain autograd records every branch. What it would save is discarded, and the first tensor that the backward asks for has the
branch run again, which computes all of them. Autograd owns the graph. So closures, shared and frozen parameters, hooks, DDP,
FSDP2 and ``torch.autograd.grad`` work as they do without recomputation.

A checkpointed branch runs again from its stored input, and one on a tape (:mod:`holotrain.reversible.tape`) from a rebuilt one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._C._autograd import _pop_saved_tensors_default_hooks as _pop_hooks
from torch._C._autograd import _push_saved_tensors_default_hooks as _push_hooks
from torch.autograd import profiler
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from holotrain.numeric import counted
from holotrain.reversible.backward_schedules import Casts, KeptResults
from holotrain.reversible.block_inputs import WAYS, InputAsIs
from holotrain.reversible.context import graph_is_retained, in_recomputation, in_trace
from holotrain.reversible.graphs import next_pair
from holotrain.reversible.reads import Arguments, Reads, is_compiled, parts_of, plain_attributes, require_unwrapped
from holotrain.reversible.settings import (
    Call,
    generators_among,
    one_convolution,
    put_back,
    python_generators_among,
    python_states,
    source_of,
)

_kind_of = attrgetter("shape", "dtype")


class BranchHistory:
    """What the runs of a branch have shown so far. It holds no module, so that a branch can go.

    Attributes:
        generators: of torch, that it and its submodules hold.
        python_generators: of Python and NumPy.
        verified: a recomputation was compared with the forward in full.
        forwards: their number.
        kinds: shapes and dtypes of what its latest forward saved.
        places: those of them that are leaves, or views or casts of leaves.
    """

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        attributes = [value for part in parts for value in vars(part).values()]
        self.generators, self.python_generators = generators_among(attributes), python_generators_among(attributes)
        self.verified = False
        self.forwards = 0
        self.kinds: list[tuple[torch.Size, torch.dtype]] = []
        self.places: list[int] = []


_histories: WeakKeyDictionary[nn.Module, BranchHistory] = WeakKeyDictionary()


def _history_of(branch: nn.Module, parts: Iterable[nn.Module]) -> BranchHistory:
    history = _histories.get(branch)
    if history is None:
        history = _histories[branch] = BranchHistory(parts)
    return history


class Branch:
    """One run of a branch in the forward, which can be repeated.

    Args:
        name: name in a trace, such as 3.g.
        module: f or g.
        keywords: its keyword arguments.
        call: what all branches of the forward share.
        keep: results that are kept and not recomputed, as in :class:`~holotrain.reversible.backward_schedules.KeptResults`.
        forward: what to call instead of the module, without the module's hooks.
        tile: the tokens that it takes of a stream (B, T, ...); None: all.
        casts: shared with the other tiles.

    Attributes:
        kinds: shape and dtype of each tensor that autograd would have saved in the forward.
        saved: what autograd saved in the latest recomputation; None where the backward has taken it.

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
        self.name, self.module, self.call = name, module, call
        self.tile, self._casts = tile, casts
        self._forward = forward or module
        self._keywords, self._arguments = keywords, Arguments(keywords) if keywords else None
        self._reads, self.history = Reads(parts), _history_of(module, parts)
        self._note_states()
        self._kept = KeptResults(keep) if keep else None
        self.kinds: list[tuple[torch.Size, torch.dtype]] = []
        # The parameters that are saved, and, by place, those of which views or casts are, by their address.
        self._parameters: list[int | None] = []
        self._derived: list[tuple[int, int]] = []
        # The leaves that the forward saved and that are no parameters of the module, and their versions.
        self._leaves: list[tuple[Tensor, int]] = []
        self.saved: list[Tensor | None] = []
        self.history.forwards = number = self.history.forwards + 1
        # It takes some 20 us, so not in each step.
        self._attributes = None if number & (number - 1) else plain_attributes(parts)

    def _note_states(self) -> None:
        """Before the forward: the states of all random number generators that it may use."""
        own, python = [*self.history.generators], [*self.history.python_generators]
        if self._arguments is not None:
            own, python = own + self._arguments.generators, python + self._arguments.python_generators
        self._states = self.call.states() + [source_of(generator).read() for generator in own]
        self._pair = next_pair(self.call.device) if self.call.on_gpu else None
        self._python_generators, self._python_after = python, None
        self._python_before = None if self.history.verified else python_states(python)

    def run(self, source: Tensor, supply: Callable[[Self], None]) -> Any:
        """The forward: returns the module's output, with a graph whose saved tensors are discarded.

        Args:
            supply: called in the backward to have the branch run again, so that ``saved`` is there.
        """
        version, saved, packed = source._version, self.saved, []

        def pack(tensor: Tensor) -> int:
            packed.append(tensor)
            return len(packed) - 1  # all that the graph keeps of the tensor

        def unpack(number: int) -> Any:
            if not saved or saved[number] is None:
                supply(self)
            tensor, saved[number] = saved[number], None  # activations go as they are used
            return tensor

        around: list[AbstractContextManager] = [self._repeatable()] if self.call.on_gpu else []
        if self._kept is not None:
            around.append(self._kept.keeping())
        try:
            update = self._called(source, pack, unpack, around)
            self._differentiable = source.requires_grad
            self._settle(source, version, packed)
        finally:
            packed.clear()  # which the graph holds
        return update

    def _settle(self, source: Tensor, version: int, packed: list[Tensor]) -> None:
        """After the forward: notes what it did."""
        if source._version != version:
            raise ValueError(
                "a branch changed its input in place, so its block cannot be inverted; "
                "its first operation must return a new tensor (inplace=False)"
            )
        if self._arguments is not None:
            self._keywords = self._arguments.settle(self._keywords)
        self._settle_states()
        self._reads.settle()
        self._note(packed, source)
        if self._kept is not None:
            self._kept.settle(needed=bool(packed))

    def _settle_states(self) -> None:
        """Keeps the states of the generators that were used, and the settings."""
        call = self.call
        call.settle(first=not self.history.verified)
        self._settings = call.settings  # earlier branches keep theirs
        before, self._states, after = self._states, [], []
        for then in before:
            now = then[0].read()
            after.append(now)
            if now[2] != then[2]:
                self._states.append(then)
        call.present = after[: len(call.sources)]
        if self._python_before is not None:
            states = python_states(self._python_generators)
            self._python_after = None if states == self._python_before else states

    def _note(self, packed: list[Tensor], source: Tensor) -> None:
        """Notes what autograd would have saved: shapes and dtypes, parameters and other leaves."""
        addresses, history = self._reads.addresses, self.history
        self.kinds, self._parameters = [*map(_kind_of, packed)], [*map(addresses.get, map(id, packed))]
        if self.kinds != history.kinds:
            history.kinds, history.places = self.kinds, [*range(len(packed))]
        places, history.places = history.places, []
        for place in places:
            leaf = _leaf_of(packed[place])
            if leaf is None:  # an activation, as in later forwards that save tensors of the same kinds
                continue
            history.places.append(place)
            if self._parameters[place] is not None:
                continue
            if id(leaf) in addresses:
                self._derived.append((place, id(leaf)))
            elif leaf is not source:
                self._leaves.append((leaf, leaf._version))

    def release(self) -> None:
        """After a recomputation that ran ahead: lets go of the results that were kept for it, unless the graph stays."""
        if self._kept is not None and not graph_is_retained():
            self._kept.release()

    def _called(self, source: Tensor, pack: Callable, unpack: Callable, around: Sequence[AbstractContextManager]) -> Any:
        """Calls the module under saved-tensor hooks, in some contexts."""
        # Private: the context manager saved_tensors_hooks calls the same, but its own calls take time where blocks are tiny.
        _push_hooks(pack, unpack)
        try:
            if not around:
                return self._forward(source, **self._keywords)
            with ExitStack() as contexts:
                for context in around:
                    contexts.enter_context(context)
                return self._forward(source, **self._keywords)
        finally:
            _pop_hooks()

    def run_again(self, source: Tensor, output: bool = True, ahead: bool = False) -> tuple[Any, list[Tensor]]:
        """The recomputation: returns the output, detached, and the tensors that autograd saves.

        Args:
            source: the stream; a tile takes its part.
            output: False: the output may be None, because the branch stops when autograd has saved its last tensor. What comes
                after that is not done again. The first recomputation of a module, and modules with hooks, do not stop.
            ahead: what it reuses stays until :meth:`release`.

        Raises:
            RuntimeError: something that the branch reads has changed since the forward, or the branch does something else.
        """
        if self._arguments is not None:
            self._arguments.require_unchanged()
        history, packed = self.history, []
        pack, versions, verified = packed.append, [], history.verified
        if not verified:  # later recomputations do as the first one, without this check

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

        self._compare_attributes()
        if self.tile is not None:
            source = source[:, self.tile].contiguous()
        update = self._called_as_then(source, pack, self._around(ahead))
        if self._casts is not None and self.tile is not None and self.tile.start == 0:
            self._casts.release()
        saved = packed.copy()
        packed.clear()  # which their graph holds
        if not verified and versions != [tensor._version for tensor in saved]:
            raise RuntimeError(f"a tensor that {type(self.module).__name__} needs for its gradient {_MODIFIED} after its use")
        self._require_same(saved)
        # A branch that sets a seed itself draws the same again.
        if not verified and self._python_after not in (None, python_states(self._python_generators)):
            raise RuntimeError(
                f"block {self.name} draws from Python's or NumPy's random numbers in its forward, and drew others when it ran "
                'again in the backward: draw with torch, or have it store its activations (backward="autograd")'
            )
        history.verified = True
        return update.detach() if isinstance(update, Tensor) else tree_map_only(Tensor, Tensor.detach, update), saved

    def _compare_attributes(self) -> None:
        """Warns if a plain attribute of the branch has another value than before the forward."""
        then, self._attributes = self._attributes, None
        if then is None:
            return
        for part, before, now in zip(self._reads.parts, then, plain_attributes(self._reads.parts), strict=True):
            for name in [name for name in before.keys() & now.keys() if repr(before[name]) != repr(now[name])]:
                which = f"{type(part).__name__}.{name}"
                warnings.warn(
                    f"{which} was {before[name]!r} before the forward and is {now[name]!r} in the backward, "
                    "where its block runs again: gradients are wrong if its forward reads it; change it after the backward",
                    stacklevel=2,
                )

    def _called_as_then(self, source: Tensor, pack: Callable, around: Sequence[AbstractContextManager]) -> Any:
        """Calls the module with all as it was before the forward; None if it has been stopped."""
        token, grad_mode, present = in_recomputation.set(True), torch.is_grad_enabled(), None
        try:
            self._reads.begin()
            if self._states:
                present = put_back(self._states)
            torch._C._set_grad_enabled(True)  # private: what torch.set_grad_enabled calls, without an object
            return self._called(source.detach().requires_grad_(self._differentiable), pack, _never, around)
        except _AllSaved:
            return None
        finally:
            torch._C._set_grad_enabled(grad_mode)
            if present is not None:
                put_back(present)
            in_recomputation.reset(token)
            self._reads.end()

    def _around(self, ahead: bool) -> list[AbstractContextManager]:
        """The contexts of a recomputation."""
        around: list[AbstractContextManager] = []
        if profiler._is_profiler_enabled:
            around.append(in_trace("recompute", self.name))
        if self._settings is not self.call.settings or not self.call.is_unchanged():
            around.append(self._settings.reinstated(self._settings.cached))
        if self.call.on_gpu:
            around.append(self._repeatable(recomputation=True))
        if self._kept is not None:
            around.append(self._kept.reusing(self._reads.storages(), ahead or graph_is_retained()))
        if self._casts is not None:
            around.append(self._casts.shared(self._reads.storages()))
        return around

    @contextmanager
    def _repeatable(self, recomputation: bool = False) -> Generator[None]:
        """The context in which the branch runs on a GPU."""
        pair = self._pair
        own = nullcontext() if pair is None else pair.used(pair.recomputation if recomputation else pair.forward)
        with one_convolution(), own:
            yield

    def _require_same(self, saved: list[Tensor]) -> None:
        """
        Raises:
            RuntimeError: the recomputation saved other tensors than the forward, or other parameters, or a leaf has changed.
        """
        name, kinds = type(self.module).__name__, [*map(_kind_of, saved)]
        if kinds != self.kinds:
            different = next((pair for pair in zip(self.kinds, kinds, strict=False) if pair[0] != pair[1]), "others")
            raise RuntimeError(
                f"{name} saved {counted(len(self.kinds), 'tensor')} for its gradient in the forward and {len(kinds)} in the "
                f"recomputation ({different}), so it did something else; its forward must do the same whenever it runs on the "
                "same input, also if a list that it appends to has been cleared"
            )
        parameters = [*map(self._reads.addresses.get, map(id, saved))]
        if parameters != self._parameters or any(id(_leaf_of(saved[place])) != leaf for place, leaf in self._derived):
            raise RuntimeError(
                f"{name} read other parameters in the recomputation than in the forward, such as those of another adapter; "
                "change what is active after the backward"
            )
        if self._leaves and any(tensor._version != version for tensor, version in self._leaves):
            raise RuntimeError(
                f"a tensor that {name} reads, other than its parameters, {_MODIFIED} between the forward and its recomputation "
                "in the backward"
            )


_MODIFIED = "was modified by an inplace operation"

_SAME_WEIGHT = {"ToCopyBackward0", "TBackward0", "TransposeBackward0"}
"""What autocast and a product do to a weight before they save it."""


def _leaf_of(tensor: Tensor) -> Tensor | None:
    """The leaf with a gradient that a tensor is, or of which it is a view or a cast."""
    if not tensor.requires_grad:
        return None
    leaf = tensor if tensor.is_leaf else tensor._base
    if leaf is not None and leaf.is_leaf:
        return leaf
    node = tensor.grad_fn  # makes an object for Python, which takes longer than the rest
    while node is not None and node.name() in _SAME_WEIGHT:
        node = node.next_functions[0][0]
    return getattr(node, "variable", None)


class _AllSaved(BaseException):
    """Ends a recomputation whose output is not needed. No Exception, because a branch may catch those."""


def _never(nothing: None) -> Tensor:
    raise RuntimeError("the graph of a recomputation was differentiated; f and g must not call backward")


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
    call = Call(x.device)
    return from_stored(Branch(name or type(module).__name__, module, keywords, call, (), forward), x, backward)


def from_stored(branch: Branch, source: Tensor, way: str = "checkpoint", part: Tensor | None = None) -> Any:
    """The branch's output; the branch is recomputed in the backward from the source.

    Args:
        way: how the source is kept, one of :data:`~holotrain.reversible.block_inputs.WAYS`.
        part: what a tile takes of the source.
    """
    kept = WAYS[way](source)
    output = branch.run(source if part is None else part, partial(_supply_from, kept))
    kept.settle()
    return output


def _supply_from(kept: InputAsIs, branch: Branch) -> None:
    with torch.inference_mode(False), torch.no_grad():  # as a backward may be called
        branch.saved[:] = branch.run_again(kept.restore(), output=False)[1]
