"""Passes keyword arguments of f and g through an autograd Function: tensors become its inputs, the rest is copied."""

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
    """Keyword arguments without their tensors; ``slots`` are the indices of the leaves that are tensors."""

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
        """Returns copies of everything that a call could change, so that a recomputation gets the values of the forward.

        Raises:
            TypeError: an argument cannot be copied.
        """
        if all(isinstance(leaf, _IMMUTABLE) for leaf in self.leaves):
            return self
        return Keywords(tuple(_copied(leaf) for leaf in self.leaves), self.spec, self.slots)

    def require_unchanged(self, keywords: dict, tensors: Sequence[Tensor]) -> None:
        """Checks that a branch did not change its keyword containers, because the recomputation would change them again.

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
                "f or g changed a list or dict among its keyword arguments; return results through the streams, "
                'or use backward="autograd"'
            )


_NONE = Keywords((), tree_flatten({})[1], ())  # as most calls have it: nothing to walk through


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, _IMMUTABLE):
        return leaf
    if isinstance(leaf, nn.Module):
        if any(parameter.requires_grad for parameter in leaf.parameters()):
            raise TypeError(
                f"the keyword argument {type(leaf).__name__} is a module with trainable parameters, which get no gradients "
                "from a recomputed block; make it a submodule of f or g, or pass its output"
            )
        return leaf
    try:
        return copy.deepcopy(leaf)
    except Exception as error:
        raise TypeError(
            f"a keyword argument of type {type(leaf).__name__} cannot be copied ({error}) for the recomputation; "
            "pass tensors, numbers, or containers of them"
        ) from error
