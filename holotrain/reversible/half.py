"""Half a coupling, forwards and backwards: ``target + module(source)``, the unit that a backward schedule works in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from holotrain.reversible.ambient import Autocast, RandomState
from holotrain.reversible.block import couple


@dataclass(frozen=True)
class Kwargs:
    """Keyword arguments taken apart: tensors can then be inputs of an autograd Function, the rest is kept as it is."""

    leaves: tuple[Any, ...]
    spec: TreeSpec
    slots: tuple[int, ...]

    @classmethod
    def take_apart(cls, kwargs: dict) -> tuple[Kwargs, list[Tensor]]:
        leaves, spec = tree_flatten(kwargs)
        slots = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        kept = tuple(None if i in slots else leaf for i, leaf in enumerate(leaves))
        return cls(kept, spec, slots), [leaves[i] for i in slots]

    def put_together(self, tensors: list[Tensor]) -> dict:
        leaves = list(self.leaves)
        for slot, tensor in zip(self.slots, tensors, strict=True):
            leaves[slot] = tensor
        return tree_unflatten(leaves, self.spec)


@dataclass
class Half:
    """One residual branch of one block, in one call.

    Args:
        module: f or g.
        parameters: those of its parameters that require grad.
        kwargs: its keyword arguments, less the tensors.
        autocast: autocast as it stood at the call.
    """

    module: nn.Module
    parameters: list[nn.Parameter]
    kwargs: Kwargs
    autocast: Autocast
    random: RandomState | None = field(default=None, init=False)

    def forward(self, target: Tensor, source: Tensor, tensors: list[Tensor]) -> Tensor:
        """Returns ``target + module(source)``; remembers the random state it started from."""
        self.random = RandomState.capture(source.device)
        return couple(target, self.module(source, **self.kwargs.put_together(tensors)))

    def backward(
        self, coupled: Tensor, source: Tensor, tensors: list[Tensor], grad: Tensor
    ) -> tuple[Tensor, Tensor | None, list[Tensor | None], list[Tensor | None]]:
        """Undoes the half and differentiates it, on one recomputation of the module.

        Args:
            coupled: ``target + module(source)``.
            source: the other stream, which this half leaves as it is.
            tensors: the tensors among its keyword arguments.
            grad: the gradient of the loss in ``coupled``; it is the gradient in ``target`` too.

        Returns:
            target, the gradient in source (None where the module does not use it), the gradients in ``tensors`` and those
            in ``parameters``.
        """
        source = source.detach().requires_grad_()
        tensors = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        parameters, call = self._differentiable()
        with torch.enable_grad(), self.autocast.replayed(), self.random.replayed():
            # A view, so that the module sees no leaf: hooks over several gradients cannot be told of leaves in here.
            update = call(source.view_as(source), **self.kwargs.put_together(tensors))
        target = coupled - update.detach()

        wanted = [source, *(tensor for tensor in tensors if tensor.requires_grad), *parameters]
        if not update.requires_grad:
            grads = [None] * len(wanted)
        else:
            grads = list(torch.autograd.grad(update, wanted, grad.to(update.dtype), allow_unused=True))
        of_source, rest = grads[0], iter(grads[1:])
        of_tensors = [next(rest) if tensor.requires_grad else None for tensor in tensors]
        return target, of_source, of_tensors, list(rest)

    def _differentiable(self):
        """The leaves to differentiate in, and the module as a function of them.

        They are the parameters themselves, unless one carries a tensor hook: differentiating in it would run the hook here
        and again when the gradient reaches the parameter. Then the module runs on aliases, which carry none.
        """
        if not any(parameter._backward_hooks for parameter in self.parameters):
            return self.parameters, self.module
        alias = {id(parameter): parameter.detach().requires_grad_() for parameter in self.parameters}
        named = {name: alias[id(p)] for name, p in self.module.named_parameters() if id(p) in alias}

        def call(source: Tensor, **kwargs: Any) -> Tensor:
            return torch.func.functional_call(self.module, named, (source,), kwargs, tie_weights=True)

        return [alias[id(parameter)] for parameter in self.parameters], call
