"""Half of a coupling, ``target + module(source)``: its forward, recomputation and gradients. Schedules work in these units."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from holotrain.reversible.ambient import RandomState, Surroundings, random_state
from holotrain.reversible.block import couple
from holotrain.reversible.buffers import Buffers
from holotrain.reversible.graph_random import TwinState
from holotrain.reversible.grid import Grid
from holotrain.reversible.keywords import Keywords
from holotrain.reversible.ranges import in_trace

Kept = Callable[[], tuple[AbstractContextManager, AbstractContextManager]]


@dataclass(frozen=True)
class Call:
    """What all halves of one call share.

    Args:
        surroundings: autocast and attention kernels in the forward.
        grid: the fixed-point grid of an exact sequence.
        kept: returns two contexts for a half: one that keeps chosen results in the forward, one that reuses them.
    """

    surroundings: Surroundings
    grid: Grid | None = None
    kept: Kept | None = None


@dataclass
class Half:
    """One residual branch of one block, in one call.

    Args:
        name: name in a trace, such as 3.g.
        module: f or g.
        parts: the module and all its submodules.
        keywords: its keyword arguments without the tensors.
        call: what all halves of the call share.
    """

    name: str
    module: nn.Module
    parts: list[nn.Module]
    keywords: Keywords
    call: Call
    parameters: list[nn.Parameter] = field(init=False)
    replays: RandomState | TwinState | None = field(default=None, init=False)
    buffers: Buffers | None = field(default=None, init=False)
    reuse: AbstractContextManager = field(default_factory=nullcontext, init=False)

    def __post_init__(self) -> None:
        owned = {id(p): p for part in self.parts for p in part._parameters.values() if p is not None}
        self.parameters = [parameter for parameter in owned.values() if parameter.requires_grad]
        self._read = [(parameter, parameter._version) for parameter in owned.values()]
        self._modes = [part.training for part in self.parts]

    @property
    def draws(self) -> bool:
        """Whether the forward drew random numbers."""
        return self.replays is not None

    def forward(self, target: Tensor, source: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """Returns ``target + module(source)`` and saves the state that its recomputation needs."""
        random = random_state(source.device)
        buffers = Buffers(self.parts)
        keywords = self.keywords.put_together(tensors)
        recorded, self.keywords = self.keywords, self.keywords.by_value()
        compiled = is_compiled(self.parts)
        if compiled and self.call.kept is not None:
            raise ValueError("keep does not work with compiled branches; do not compile f and g, or set keep=()")
        with ExitStack() as stack:
            stack.enter_context(random.recorded())
            if self.call.kept is not None:
                stack.enter_context(self.call.surroundings.uncached())  # a cached cast would be an operation less
                keep, self.reuse = self.call.kept()
                stack.enter_context(keep)
            if self.call.kept is not None or compiled:
                # Compiled code and the choice of kernels may differ between a forward that is differentiated and one that
                # is not: the two runs must be the same code to round, and draw, the same.
                stack.enter_context(torch.enable_grad())
                source = source.detach().requires_grad_()
            version = source._version
            update = self.module(source, **keywords)
        if source._version != version:
            raise ValueError(
                "f or g changed its input in place, so its block cannot be inverted; "
                "its first operation must return a new tensor (inplace=False)"
            )
        recorded.require_unchanged(keywords, tensors)
        self.replays = random if random.moved() else None
        self.buffers = buffers.written()
        replaced = set() if self.buffers is None else self.buffers.owners
        unwritten = (part for part in self.parts if id(part) not in replaced)
        self._read += [(b, b._version) for part in unwritten for b in part._buffers.values() if b is not None]
        return couple(target, update.detach() if isinstance(update, Tensor) else update, self.call.grid)

    @torch.no_grad()  # of the thread that it runs on, which may be a worker
    def recompute(self, coupled: Tensor, source: Tensor, tensors: Sequence[Tensor]) -> Rebuilt:
        """Runs the module again with a graph, and inverts the half.

        Args:
            coupled: ``target + module(source)``.
            source: the other stream, which this half does not change.
            tensors: the tensors among its keyword arguments.

        Raises:
            RuntimeError: a parameter or buffer was changed in place after the forward, or a module's training mode changed.
        """
        with in_trace("recompute", self.name):
            return self._rebuild(coupled, source, tensors)

    def _rebuild(self, coupled: Tensor, source: Tensor, tensors: Sequence[Tensor]) -> Rebuilt:
        if [part.training for part in self.parts] != self._modes:
            raise RuntimeError(
                "f or g was switched between train() and eval() after the forward, so its recomputation in the backward "
                "would differ; switch after the backward"
            )
        if any(parameter._version != version for parameter, version in self._read):
            raise RuntimeError(
                "a parameter or buffer of f or g was changed in place between the forward and its recomputation in "
                "the backward, so the activations can no longer be rebuilt; step the optimizer after the backward"
            )
        source = source.detach().requires_grad_()
        tensors = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        keywords = self.keywords.by_value().put_together(tensors)
        parameters, run = self._differentiable()
        with torch.enable_grad(), self.call.surroundings.replayed():
            seen = source.view_as(source)  # no leaf: hooks over several gradients cannot be told of leaves in here
            with ExitStack() as stack:
                if self.replays is not None:
                    stack.enter_context(self.replays.replayed())
                if self.buffers is not None:
                    stack.enter_context(self.buffers.replayed())
                if self.call.kept is not None:
                    stack.enter_context(self.call.surroundings.uncached())
                stack.enter_context(self.reuse)  # last: it counts every operation from here
                update = run(seen, **keywords)
        added = update.detach()
        if self.call.grid is not None:
            added = self.call.grid.round(added.to(coupled.dtype))
        return Rebuilt(coupled - added, update, source, tensors, parameters)

    def _differentiable(self) -> tuple[list[Tensor], Callable[..., Tensor]]:
        """The leaves to differentiate in, and the module as a function of them.

        They are the parameters themselves, unless one carries a tensor hook: differentiating in it would run the hook here
        and again when the gradient reaches the parameter. Then the module runs on aliases, which carry none.
        """
        if not self.hooked:
            return self.parameters, self.module
        alias = {id(parameter): parameter.detach().requires_grad_() for parameter in self.parameters}
        named = {name: alias[id(p)] for name, p in self.module.named_parameters() if id(p) in alias}

        def run(source: Tensor, **keywords: Any) -> Tensor:
            return torch.func.functional_call(self.module, named, (source,), keywords, tie_weights=True)

        return [alias[id(parameter)] for parameter in self.parameters], run

    @property
    def hooked(self) -> bool:
        """Whether a parameter carries a tensor hook."""
        return any(parameter._backward_hooks for parameter in self.parameters)


@dataclass
class Rebuilt:
    """The result of a recomputation: the target, and the graph of the module, which is differentiated once."""

    target: Tensor
    update: Tensor
    source: Tensor
    tensors: list[Tensor]
    parameters: list[Tensor]

    def differentiate(self, grad: Tensor | None) -> Gradients:
        """Returns the gradients, given ``grad`` of the coupled stream, and frees the graph."""
        wanted = [self.source, *(tensor for tensor in self.tensors if tensor.requires_grad), *self.parameters]
        if grad is None or not self.update.requires_grad:
            grads = [None] * len(wanted)
        else:
            grads = list(torch.autograd.grad(self.update, wanted, grad.to(self.update.dtype), allow_unused=True))
        of_source, rest = grads[0], iter(grads[1:])
        of_tensors = [next(rest) if tensor.requires_grad else None for tensor in self.tensors]
        return Gradients(of_source, of_tensors, list(rest))


@dataclass
class Gradients:
    """Gradients of one half, for its source, keyword tensors and parameters. None if the output does not depend on them."""

    source: Tensor | None
    tensors: list[Tensor | None]
    parameters: list[Tensor | None]


def parts_of(module: nn.Module) -> list[nn.Module]:
    """The module and all its submodules, each once; several times as fast as ``modules()``."""
    seen = {id(module): module}
    waiting = [module]
    while waiting:
        for part in waiting.pop()._modules.values():
            if part is not None and id(part) not in seen:
                seen[id(part)] = part
                waiting.append(part)
    return list(seen.values())


def is_compiled(parts: Iterable[nn.Module]) -> bool:
    """Whether one of the modules is compiled."""
    return any(part._compiled_call_impl is not None or "_orig_mod" in part._modules for part in parts)
