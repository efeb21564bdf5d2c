"""Blocks that torch.compile recomputes in the backward: the compiler fuses operations, so that fewer results are written.

Without a budget the block is compiled as a call of ``torch.utils.checkpoint``: it keeps its inputs, and the state of the random
number generator that it draws from. A budget from 0 to 1 is torch's ``activation_memory_budget``, set while the block is
compiled: of what the compiler would store by itself, the share that it may store. With a low budget torch 2.14 also draws
random numbers anew in the backward, others than the forward did, so that gradients are wrong without a word. Here they are
stored.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from operator import getitem
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from holotrain.reversible.block_inputs import WAYS, InputAsIs
from holotrain.schedules import COMPILED, budget_of, kind_of

BACKEND = "inductor"
"""Of torch.compile, where none is given."""

OFTEN = 4
"""Compilations of a class of blocks that are usual: its first block, whose input may need no gradient, and the others, each for
one length and for all."""

options_of: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()
"""Options of torch.compile for a block, such as its mode."""


class CompiledCall:
    """The compiled call of blocks of one class, which share its code.

    Args:
        kind: the class.
        backward: a schedule of :data:`~holotrain.schedules.COMPILED`, with or without a budget.
        backend, mode: of torch.compile; the mode is one of inductor's.
    """

    def __init__(self, kind: type[nn.Module], backward: str, backend: str = BACKEND, mode: str | None = None) -> None:
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException  # not at the top: it imports the compiler

        self._refusals = TorchDynamoException, FailOnRecompileLimitHit
        self._kind, self._backend, self._compilations, self._said = kind, backend, 0, False
        self._budget, self._way = budget_of(backward), COMPILED[kind_of(backward)]
        self._options = {"config_patches": torch._inductor.list_mode_options(mode)} if mode else {}
        self._eager: WeakSet[nn.Module] = WeakSet()
        recomputed = partial(checkpoint, use_reentrant=False) if self._budget is None else None

        def call(function: Callable, x: Tensor, keywords: dict[str, Any]) -> Any:
            return function(x, **keywords) if recomputed is None else recomputed(function, x, **keywords)

        code: CodeType = call.__code__
        call.__code__ = code.replace(co_name=kind.__name__)  # compiled code, and a limit of it, belong to a code object
        self._run = torch.compile(call, backend=self._compile, fullgraph=True)

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable:
        """The backend: the budget holds while this graph is compiled."""
        self._compilations += 1
        # Private: torch 2.14's public region_activation_memory_budget draws random numbers anew, too, and torch 2.11 has none.
        stores = {"activation_memory_budget": self._budget, "joint_custom_pass": _store_random_numbers}
        with nullcontext() if self._budget is None else torch._functorch.config.patch(stores):
            return torch._dynamo.lookup_backend(self._backend)(graph, inputs, **self._options)

    def __call__(self, module: nn.Module, function: Callable, x: Tensor, keywords: dict[str, Any], eager: Callable) -> Any:
        """``function(x, **keywords)``, or what ``eager()`` returns, if the block cannot be compiled; a warning says why.

        Args:
            module: the block.
            eager: the same without the compiler.
        """
        if module in self._eager:
            return eager()
        kept = WAYS[self._way](x)
        try:
            with nullcontext() if type(kept) is InputAsIs else _in_place_of(x, kept):
                output = self._run(function, x, keywords)
        except self._refusals as error:  # nothing has run
            output = eager()  # whose own error is the user's
            self._eager.add(module)
            self._say(f"{self._kind.__name__} is recomputed without the compiler ({_first_line(error)})")
            return output
        kept.settle()
        if self._compilations > OFTEN:
            self._say(
                f"{self._kind.__name__} was compiled {self._compilations} times: its arguments or attributes differ between "
                "blocks or steps; TORCH_LOGS=recompiles shows which"
            )
        return output

    def _say(self, message: str) -> None:
        if not self._said:
            self._said = True
            warnings.warn(message, stacklevel=6)


def compiled_call(module: nn.Module, backward: str, function: Callable, x: Tensor, keywords: dict, eager: Callable) -> Any:
    """A block's call; see :class:`CompiledCall`."""
    options = {"backend": BACKEND} | options_of.get(module, {})
    return _call_of_kind(type(module), backward, **options)(module, function, x, keywords, eager)


_call_of_kind = cache(CompiledCall)


def _in_place_of(x: Tensor, kept: InputAsIs) -> AbstractContextManager:
    """Inside, what is kept of x is saved for the backward in its place."""
    place = x.data_ptr(), x.shape  # the graph holds the function below, and is not to hold x

    def pack(tensor: Tensor) -> Any:
        return kept if (tensor.data_ptr(), tensor.shape) == place else tensor

    return saved_tensors_hooks(pack, lambda saved: kept.restore() if saved is kept else saved)


def _store_random_numbers(joint: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
    """Marks in a graph of forward and backward what the forward draws, so that the backward does not draw it again."""
    for node in joint.graph.nodes:
        drawing = node.args[0] if node.target is getitem else node
        if torch.Tag.nondeterministic_seeded in getattr(drawing.target, "tags", ()):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return joint


def _first_line(error: BaseException) -> str:
    """Of the cause, such as a graph break, a limit of compilations, or a compiler that is missing."""
    lines = str(error.__cause__ or error).splitlines()
    return next((line.strip() for line in lines if line.strip()), type(error).__name__)
