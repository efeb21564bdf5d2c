"""Keyword arguments of f and g on their way through an autograd Function: tensors as its inputs, the rest by value."""

from __future__ import annotations

import copy
import enum
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

_IMMUTABLE = (
    *(type(None), bool, int, float, complex, str, bytes, type, enum.Enum),
    *(types.FunctionType, types.BuiltinFunctionType),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)


@dataclass(frozen=True)
class Keywords:
    """Keyword arguments taken apart; ``slots`` says which of the leaves are tensors, handed over apart."""

    leaves: tuple[Any, ...]
    spec: TreeSpec
    slots: tuple[int, ...]

    @classmethod
    def take_apart(cls, keywords: dict) -> tuple[Keywords, list[Tensor]]:
        if not keywords:
            return _NONE, []
        leaves, spec = tree_flatten(keywords)
        slots = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        kept = tuple(None if i in slots else leaf for i, leaf in enumerate(leaves))
        return cls(kept, spec, slots), [leaves[i] for i in slots]

    def put_together(self, tensors: Sequence[Tensor]) -> dict:
        if self is _NONE:
            return {}
        leaves = list(self.leaves)
        for slot, tensor in zip(self.slots, tensors, strict=True):
            leaves[slot] = tensor
        return tree_unflatten(leaves, self.spec)

    def by_value(self) -> Keywords:
        """The same with copies of all that a call could change, so that a recomputation sees what the forward saw.

        Raises:
            TypeError: an argument that cannot be copied.
        """
        if all(isinstance(leaf, _IMMUTABLE) for leaf in self.leaves):
            return self
        return Keywords(tuple(_copied(leaf) for leaf in self.leaves), self.spec, self.slots)

    def require_unchanged(self, keywords: dict, tensors: Sequence[Tensor]) -> None:
        """Refuses a branch that edited its keyword containers: the recomputation would edit them again.

        Raises:
            ValueError: an entry was added, removed or replaced.
        """
        if self is _NONE:
            return
        leaves, spec = tree_flatten(keywords)
        before = self.put_together(tensors)
        same = spec == self.spec and all(a is b for a, b in zip(leaves, tree_flatten(before)[0], strict=True))
        if not same:
            raise ValueError(
                "f or g added to or replaced part of its keyword arguments; what it reports must be a tensor of the streams, "
                'or use backward="autograd"'
            )


_NONE = Keywords((), tree_flatten({})[1], ())  # as most calls have it: nothing to walk through


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, _IMMUTABLE):
        return leaf
    if isinstance(leaf, nn.Module):
        if any(parameter.requires_grad for parameter in leaf.parameters()):
            raise TypeError(
                f"the keyword argument {type(leaf).__name__} is a module with parameters to train, which a recomputed block "
                "cannot give gradients to; make it a part of f or g, or hand over its output"
            )
        return leaf
    try:
        return copy.deepcopy(leaf)
    except Exception as error:
        raise TypeError(
            f"a keyword argument of type {type(leaf).__name__} cannot be copied ({error}), so a recomputation could not be "
            "given what the forward saw; pass tensors, numbers, or containers of them"
        ) from error
