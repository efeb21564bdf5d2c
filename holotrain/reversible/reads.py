"""What a branch reads in its forward, and must read again in its recomputation: parameters, buffers and keyword arguments."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, MutableMapping
from functools import cache
from itertools import chain, islice
from operator import attrgetter, is_, methodcaller
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from holotrain.reversible.context import has_no_data
from holotrain.reversible.random_state import generators_among

try:
    import numpy
except ImportError:  # torch works without it
    numpy = None


_version, _training, _values, _flat = (
    attrgetter("_version"),
    attrgetter("training"),
    methodcaller("values"),
    chain.from_iterable,
)
_state_of = attrgetter("training", "_parameters", "_modules", "_buffers", "_forward_pre_hooks", "_forward_hooks")
_hooks_of = attrgetter(
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)

_ABSENT = object()

_NormBase = nn.modules.batchnorm._NormBase  # private: the one class of all norms with running statistics


def parts_of(module: nn.Module) -> list[nn.Module]:
    """The module and all its submodules, each once; several times as fast as ``modules()``."""
    parts = [module]
    for part in parts:  # which grows
        if part._modules:
            parts += [child for child in part._modules.values() if child is not None]
    return [*dict.fromkeys(parts)]


def is_compiled(module: nn.Module) -> bool:
    """Whether the module itself is compiled."""
    # Private: nothing public tells it. The first is set by module.compile(), the second by torch.compile(module).
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def version_of(tensor: Tensor) -> int:
    """Counts changes in place; 0 for an inference tensor, which has no count."""
    return 0 if tensor.is_inference() else tensor._version


_written: WeakKeyDictionary[nn.Module, dict[bool, set[str]]] = WeakKeyDictionary()
"""Names of the buffers that a module's forward changes, in training mode and not, as its first forward in that mode showed."""


class _Buffer(NamedTuple):
    """A buffer before a forward; ``before`` is a copy, if the forward may change it."""

    owner: nn.Module
    name: str
    tensor: Tensor
    version: int
    before: Tensor | None

    def was_written(self) -> bool:
        if self.owner._buffers.get(self.name) is not self.tensor or version_of(self.tensor) != self.version:
            return True
        # torch's normalisations and ``.data`` write without counting it as a version.
        if isinstance(self.owner, _NormBase) or self.before is None or has_no_data(self.tensor):
            return isinstance(self.owner, _NormBase) and self.owner.training
        return not torch.equal(self.tensor, self.before)


class Reads:
    """The parameters, buffers, submodules, modes and forward hooks of a branch in one forward, which it has again in the
    recomputation.

    A module may change its buffers in the forward (running statistics, power iterations). The recomputation reads what the
    forward read and changes nothing. So the buffers that a module's first forward changes are copied before each later one.

    Attributes:
        tensors: the parameters; after the forward also the buffers that it did not change.
        known: their addresses.
    """

    def __init__(self, parts: list[nn.Module]) -> None:
        # Without loops over the parts, which would take a tenth of the time of a tiny branch.
        modes, parameters, modules, buffers, hooks_before, hooks_after = zip(*map(_state_of, parts), strict=True)
        self.parts, self._modes = parts, [*modes]
        # What holds parameters and submodules by name, and what it held.
        self._owners: list[MutableMapping[str, Any]] = [*filter(None, parameters), *filter(None, modules)]
        self._sizes, self._names = [*map(len, self._owners)], [*_flat(self._owners)]
        self._held = [*_flat(map(_values, self._owners))]
        self.tensors = [tensor for tensor in _flat(map(_values, parameters)) if tensor is not None]
        self._buffers = [*_buffers_of(parts)] if any(buffers) else []
        self._others: list[tuple[MutableMapping[str, Any], str, Any]] = []
        hooked = parts if any(hooks_before) or any(hooks_after) else []
        self._hooks = [(hooks, hooks.copy()) for part in hooked for hooks in _hooks_of(part)]
        self._other_hooks: list[tuple[dict, dict]] = []
        self._newly_written: str | None = None

    def settle(self) -> None:
        """After the forward: keeps the copies of buffers that it changed, and notes what it read."""
        if self._buffers:
            self._settle_buffers()
        addresses = [*map(id, self.tensors)]
        self.known = dict(zip(addresses, addresses, strict=True))
        self._versions = [*map(_version, self.tensors)]
        # Held, so that their memory is not used again, at the same address, when ``.data`` is replaced.
        self._storages = [*map(Tensor.untyped_storage, self.tensors)]

    def hooked(self) -> bool:
        """Whether forward hooks run in the recomputation."""
        return bool(self._hooks) or any(part._forward_hooks for part in self.parts)

    def storages(self) -> set[int]:
        """Those of the parameters, by their address."""
        return {storage._cdata for storage in self._storages}

    def _settle_buffers(self) -> None:
        kept = []
        for buffer in self._buffers:
            known = _written.setdefault(buffer.owner, {}).setdefault(buffer.owner.training, set())
            if not buffer.was_written():
                kept.append(buffer._replace(before=None))
                self.tensors.append(buffer.tensor)
                continue
            known.add(buffer.name)
            if buffer.before is None:
                self._newly_written = buffer.name
            else:
                kept.append(buffer)
        self._buffers = kept

    def begin(self) -> None:
        """From here on the branch has again what it had.

        Raises:
            RuntimeError: a parameter or buffer was changed after the forward, or a module's training mode was.
        """
        if self._newly_written is not None:
            raise RuntimeError(
                f"the forward of a block changed its buffer {self._newly_written!r}, which its first forward did not do, so it "
                "was not saved for the recomputation; it is from the next forward on"
            )
        if [*map(_training, self.parts)] != self._modes:
            raise RuntimeError(
                "a block was switched between train() and eval() after the forward, so its recomputation in the backward "
                "would differ; switch after the backward"
            )
        same_versions = [*map(_version, self.tensors)] == self._versions
        if not (same_versions and all(map(is_, map(Tensor.untyped_storage, self.tensors), self._storages))):
            raise RuntimeError(
                "a parameter or buffer of a block was changed between the forward and its recomputation in the backward, "
                "so the activations can no longer be rebuilt; step the optimizer after the backward (one that steps in the "
                "backward trains no weight of a block that an earlier block reads without a gradient)"
            )
        present = [*_flat(map(_values, self._owners))]
        if len(present) != len(self._held) or not all(map(is_, present, self._held)):  # by torch.func.functional_call, for one
            held = zip(self._names, self._held, strict=True)
            for owner, size in zip(self._owners, self._sizes, strict=True):
                for name, value in islice(held, size):
                    if owner.get(name) is not value:
                        self._put(owner, name, value)
        for owner, name, tensor, _, before in self._buffers:
            if before is not None or owner._buffers.get(name) is not tensor:
                self._put(owner._buffers, name, tensor if before is None else before.clone())

        for hooks, held in self._hooks:
            if hooks != held:
                self._other_hooks.append((hooks, hooks.copy()))
                _refill(hooks, held)

    def _put(self, owner: MutableMapping[str, Any], name: str, value: Any) -> None:
        self._others.append((owner, name, owner.get(name, _ABSENT)))
        owner[name] = value

    def end(self) -> None:
        """The branch has what it had before :meth:`begin`."""
        for hooks, held in self._other_hooks:
            _refill(hooks, held)
        self._other_hooks = []
        if self._others:
            for owner, name, value in self._others:
                if value is _ABSENT:
                    del owner[name]
                else:
                    owner[name] = value
            self._others = []


def _refill(hooks: dict, held: dict) -> None:
    """In place and in order: the handle of a hook knows the dict that holds it."""
    hooks.clear()
    hooks.update(held)


def _buffers_of(parts: Iterable[nn.Module]) -> Iterator[_Buffer]:
    for part in parts:
        names = _written.get(part, {}).get(part.training, part._buffers)  # at first any may turn out to be changed
        for name, buffer in part._buffers.items():
            if buffer is not None:
                yield _Buffer(part, name, buffer, version_of(buffer), buffer.clone() if name in names else None)


class Arguments:
    """The keyword arguments of a branch in one call. They are passed on and not copied, except for lists, tuples and dicts.

    Raises:
        TypeError: an argument is an iterator, which only one of the two runs could use.
    """

    def __init__(self, keywords: dict[str, Any]) -> None:
        self._leaves, self._spec = tree_flatten(keywords)
        for leaf in self._leaves:
            if isinstance(leaf, Iterator):
                raise TypeError(
                    f"a keyword argument of a block is a {type(leaf).__name__}, which the forward uses up, so that nothing is "
                    "left for the recomputation; pass a list"
                )
        self._marks = [_mark(leaf) for leaf in self._leaves]
        self.generators = generators_among(self._leaves)

    def settle(self, keywords: dict[str, Any]) -> dict[str, Any]:
        """After the forward: returns the arguments in containers of their own.

        Tensors are without their graph: if they were computed from a stream, it holds the branch, and neither would be freed.

        Raises:
            ValueError: the forward added, removed or replaced an entry; the recomputation would do so again.
        """
        leaves, spec = tree_flatten(keywords)
        if spec != self._spec or any(a is not b for a, b in zip(leaves, self._leaves, strict=True)):
            raise ValueError(
                "a block changed a list or dict among its keyword arguments; return results through the streams, "
                'or use backward="autograd"'
            )
        own = {id(leaf): _without_graph(leaf) for leaf in leaves}  # one tensor may come twice
        self._leaves = [own[id(leaf)] for leaf in leaves]
        return tree_unflatten(self._leaves, spec)

    def require_unchanged(self) -> None:
        """
        Raises:
            RuntimeError: a tensor or array among them was changed in place after the forward.
        """
        for leaf, mark in zip(self._leaves, self._marks, strict=True):
            if _mark(leaf) != mark:
                raise RuntimeError(
                    f"a keyword argument of a block, a {type(leaf).__name__}, was modified by an inplace operation between the "
                    "forward and its recomputation in the backward; change a copy"
                )


def _without_graph(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
        return leaf.detach().requires_grad_()
    return leaf


def _mark(leaf: Any) -> int | None:
    """A number that tells whether an argument was changed in place; None: it cannot be told."""
    if isinstance(leaf, Tensor):
        return version_of(leaf)
    return hash(leaf.tobytes()) if numpy is not None and isinstance(leaf, numpy.ndarray) else None


@cache
def require_unwrapped(kinds: frozenset[type[nn.Module]]) -> None:
    """
    Args:
        kinds: the classes of a branch and its submodules.

    Raises:
        ValueError: one of them is wrapped in DDP, FSDP1 or similar, or sharded by itself.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported for the question's sake
    for kind in kinds:
        if kind.__module__.startswith("torch.nn.parallel") or (fsdp and issubclass(kind, fsdp.FullyShardedDataParallel)):
            raise ValueError(
                f"{kind.__name__} inside a ReversibleBlock would run twice, in the forward and in the recomputation; "
                "wrap the whole model, or apply fully_shard to the blocks"
            )
        if is_sharded(kind):
            raise ValueError(
                "fully_shard was applied to f, g or a submodule; a recomputed block gathers its parameters as a whole: "
                "apply fully_shard to the ReversibleBlock"
            )


@cache
def is_sharded(kind: type[nn.Module]) -> bool:
    """Whether modules of this class gather their parameters in their call (FSDP2), so that they cannot run ahead of it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and issubclass(kind, fsdp.FSDPModule)


def is_tensor_parallel(module: nn.Module) -> bool:
    """Whether several processes hold the module's parameters."""
    tensor = sys.modules.get("torch.distributed.tensor")  # without it there is no DTensor, and importing it takes time
    return tensor is not None and any(isinstance(parameter, tensor.DTensor) for parameter in module.parameters())
