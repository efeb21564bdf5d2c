"""What a branch reads in its forward, and must read again in its recomputation: parameters, buffers and keyword arguments."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from copy import copy
from functools import cache
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from holotrain.reversible.context import has_no_data

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


def _copied(buffers: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if tensor is None else tensor.detach().clone() for name, tensor in buffers.items()}


def _are_equal(tensor: Tensor | None, other: Tensor | None) -> bool:
    if tensor is None or other is None or has_no_data(tensor):
        return tensor is other or tensor is not None
    return torch.equal(tensor, other)


_writes: WeakKeyDictionary[nn.Module, dict[bool, bool]] = WeakKeyDictionary()
"""Whether a module's forward changes its buffers, in training mode and not, as its forwards have shown so far."""


_OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


def plain_attributes(parts: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """Copies of the numbers, strings, and lists and dicts of them that modules hold."""
    return [{name: copy(value) for name, value in vars(part).items() if name not in _OWN and is_plain(value)} for part in parts]


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a string, or a list, tuple or dict of them."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    return all(isinstance(each, bool | int | float | str) for each in inner)


class _Buffers:
    """The buffers of one module before a forward, and copies of them, unless earlier forwards have changed none."""

    def __init__(self, module: nn.Module) -> None:
        self.present, self._before = module._buffers, dict(module._buffers)
        self._versions = [*map(version_of, self.tensors())]
        self._writes, self._mode = _writes.setdefault(module, {}), module.training
        self.copies = _copied(self._before) if self._writes.get(self._mode, True) else None

    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in self.present.values() if tensor is not None]

    def are_written(self) -> bool:
        """After the forward: whether it changed one. Batch norms, and ``.data``, do so without counting it as a version."""
        written = self._writes.get(self._mode, False) or not all(map(is_, self.present.values(), self._before.values()))
        written = written or [*map(version_of, self.tensors())] != self._versions
        if not written and self.copies is not None:
            written = not all(map(_are_equal, self.present.values(), self.copies.values()))
        self._writes[self._mode] = written
        return written


class Reads:
    """The parameters, buffers, submodules, modes and hooks of a branch in one forward, which it has in the recomputation too.

    A module may change its buffers in the forward (running statistics, power iterations). Its recomputation reads copies of
    what the forward read, and what it writes to them goes.

    Args:
        parts: the branch's module and all in it.
        attributes: whether the plain attributes of modules are compared, too.

    Attributes:
        tensors: the parameters; after the forward also the buffers of modules that changed none.
        addresses: theirs, each by itself, to look one up; until the forward ends also those of all buffers.
        hooked: whether forward hooks are registered.
    """

    def __init__(self, parts: list[nn.Module], attributes: bool = False) -> None:
        # Without loops over the parts, which would take a tenth of the time of a tiny branch.
        modes, parameters, modules, buffers, hooks_before, hooks_after = zip(*map(_state_of, parts), strict=True)
        self._parts, self._modes = parts, [*modes]
        self._attributes = plain_attributes(parts) if attributes else None
        self.hooked = any(hooks_before) or any(hooks_after)
        self._owners = [*filter(None, parameters), *filter(None, modules)]
        if self.hooked:  # maybe only for the time of the model's forward, as peft does
            self._owners += _flat(map(_hooks_of, parts))
        self.tensors = [tensor for tensor in _flat(map(_values, parameters)) if tensor is not None]
        self._buffers = [_Buffers(part) for part in parts if part._buffers] if any(buffers) else []
        held = chain(self.tensors, *(each.tensors() for each in self._buffers))
        self.addresses = {address: address for address in map(id, held)}
        self._copies: list[tuple[dict, dict]] = []
        self._written_late = False
        self._replaced: list[tuple[dict, dict]] = []

    def settle(self) -> None:
        """After the forward: notes what it read, and lets go of the copies of buffers that it did not change."""
        for buffers in self._buffers:
            if not buffers.are_written():
                self._owners.append(buffers.present)
                self.tensors += buffers.tensors()
            elif buffers.copies is None:
                self._written_late = True
            else:
                self._copies.append((buffers.present, buffers.copies))
        if self._buffers:
            self.addresses = {address: address for address in map(id, self.tensors)}
        self._buffers.clear()
        self._held, self._versions = [*map(dict, self._owners)], [*map(_version, self.tensors)]
        # Held, so that their memory is not used again, at the same address, when ``.data`` is replaced.
        self._storages = [*map(Tensor.untyped_storage, self.tensors)]

    def storages(self) -> set[int]:
        """Those of the parameters, by their address."""
        return {storage._cdata for storage in self._storages}

    def begin(self) -> None:
        """From here on the branch has again what it had.

        Raises:
            RuntimeError: a parameter or buffer was changed after the forward, or a module's training mode was.
        """
        if self._written_late:
            raise RuntimeError(
                "the forward of a block changed a buffer, which its first forward did not do, so it was not saved for the "
                "recomputation; it is from the next forward on"
            )
        self._compare_attributes()
        if [*map(_training, self._parts)] != self._modes:
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
        present, held = ([*_flat(map(_values, owners))] for owners in (self._owners, self._held))
        if len(present) != len(held) or not all(map(is_, present, held)):  # by torch.func.functional_call, for one
            for owner, then in zip(self._owners, self._held, strict=True):
                self._replace(owner, then)
        for owner, copies in self._copies:
            self._replace(owner, _copied(copies))

    def _compare_attributes(self) -> None:
        """Warns once if a plain attribute of a module has another value than before the forward."""
        then, self._attributes = self._attributes, None
        if then is None:
            return
        for part, before, now in zip(self._parts, then, plain_attributes(self._parts), strict=True):
            for name in [name for name in before.keys() & now.keys() if repr(before[name]) != repr(now[name])]:
                which = f"{type(part).__name__}.{name}"
                warnings.warn(
                    f"{which} was {before[name]!r} before the forward and is {now[name]!r} in the backward, "
                    "where its block runs again: gradients are wrong if its forward reads it; change it after the backward",
                    stacklevel=2,
                )

    def _replace(self, owner: dict, values: dict) -> None:
        self._replaced.append((owner, dict(owner)))
        _refill(owner, values)

    def end(self) -> None:
        """The branch has what it had before :meth:`begin`."""
        for owner, values in self._replaced:
            _refill(owner, values)
        self._replaced = []


def _refill(owner: dict, values: dict) -> None:
    owner.clear()
    owner.update(values)


class Arguments:
    """The keyword arguments of a branch in one call. They are passed on and not copied, except for lists, tuples and dicts.

    Attributes:
        keywords, leaves: the arguments, and what their lists, tuples and dicts hold.

    Raises:
        TypeError: an argument is an iterator, which only one of the two runs could use.
    """

    def __init__(self, keywords: dict[str, Any]) -> None:
        self.keywords, self.leaves, self._marks = keywords, [], []
        if not keywords:
            return
        self.leaves, self._spec = tree_flatten(keywords)
        for leaf in self.leaves:
            if isinstance(leaf, Iterator):
                raise TypeError(
                    f"a keyword argument of a block is a {type(leaf).__name__}, which the forward uses up, so that nothing is "
                    "left for the recomputation; pass a list"
                )
        self._marks = [*map(_mark, self.leaves)]

    def settle(self) -> None:
        """After the forward: takes the arguments in containers of their own.

        Tensors are without their graph: if they were computed from a stream, it holds the branch, and neither would be freed.

        Raises:
            ValueError: the forward added, removed or replaced an entry; the recomputation would do so again.
        """
        if not self.keywords:
            return
        leaves, spec = tree_flatten(self.keywords)
        if spec != self._spec or any(a is not b for a, b in zip(leaves, self.leaves, strict=True)):
            raise ValueError(
                "a block changed a list or dict among its keyword arguments; return results through the streams, "
                'or use backward="autograd"'
            )
        own = {id(leaf): _without_graph(leaf) for leaf in leaves}  # one tensor may come twice
        self.leaves = [own[id(leaf)] for leaf in leaves]
        self.keywords = tree_unflatten(self.leaves, spec)

    def require_unchanged(self) -> None:
        """
        Raises:
            RuntimeError: a tensor or array among them was changed in place after the forward.
        """
        for leaf, mark in zip(self.leaves, self._marks, strict=True):
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
    return hash(leaf.tobytes()) if hasattr(leaf, "tobytes") else None  # an array of NumPy


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
