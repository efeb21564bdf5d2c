"""``torch.utils.checkpoint`` for each block. Buffers are updated once, and keyword arguments are copied."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from holotrain.reversible.ambient import random_state, recomputation
from holotrain.reversible.block import ReversibleBlock
from holotrain.reversible.buffers import Buffers
from holotrain.reversible.grid import Grid
from holotrain.reversible.keywords import Keywords
from holotrain.reversible.ranges import in_trace


def run_checkpointing(
    blocks: Sequence[ReversibleBlock],
    x1: Tensor,
    x2: Tensor,
    f_kwargs: dict,
    g_kwargs: dict,
    grid: Grid | None = None,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """Stores the two streams between blocks and recomputes each block; ``first`` is the number of the first block."""
    keywords, tensors = Keywords.take_apart({"f_kwargs": f_kwargs, "g_kwargs": g_kwargs})
    for number, block in enumerate(blocks, first):
        if torch.compiler.is_compiling():  # the compiler recomputes by rules of its own, which take no contexts
            x1, x2 = checkpoint(block, x1, x2, f_kwargs, g_kwargs, grid=grid, use_reentrant=False)
            continue
        x1, x2 = _Checkpointed(number, block, partial(block, grid=grid), keywords)(x1, x2, *tensors)
    return x1, x2


def checkpointed(module: nn.Module, x: Tensor) -> Tensor:
    """``module(x)``, recomputed in the backward: for modules that are not reversible, between blocks that are."""
    if torch.compiler.is_compiling():
        return checkpoint(module, x, use_reentrant=False)
    keywords, _ = Keywords.take_apart({})
    return _Checkpointed(type(module).__name__, module, module, keywords)(x)


class _Checkpointed:
    """One module in one call; ``name`` tells it in a trace."""

    def __init__(self, name: object, module: nn.Module, run: Callable, keywords: Keywords) -> None:
        self.name = name
        self.run = run
        self.keywords, self.as_given = keywords, keywords.by_value()
        self.buffers: Buffers | None = Buffers(module.modules())

    def __call__(self, *tensors: Tensor) -> Any:
        """``tensors``: the streams, then those of the keywords."""
        self.random = random_state(tensors[0].device)
        contexts = self._recorded(), _Reusable(self._replayed)
        with in_trace("forward", self.name):
            return checkpoint(self._run, *tensors, use_reentrant=False, context_fn=lambda: contexts, preserve_rng_state=False)

    def _run(self, *tensors: Tensor) -> Any:
        streams = len(tensors) - len(self.keywords.slots)
        return self.run(*tensors[:streams], **self.keywords.put_together(tensors[streams:]))

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        with self.random.recorded():
            yield
        self.buffers = self.buffers.written()
        self.keywords = self.as_given

    @contextmanager
    def _replayed(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(in_trace("recompute", self.name))
            stack.enter_context(recomputation())
            self.keywords = self.as_given.by_value()  # a retained graph is recomputed more than once
            if self.buffers is not None:
                stack.enter_context(self.buffers.replayed())
            stack.enter_context(self.random.replayed())
            yield


class _Reusable(AbstractContextManager):
    """A context entered anew each time: a retained graph is recomputed more than once."""

    def __init__(self, context: Callable[[], AbstractContextManager]) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._entered = self._context()
        self._entered.__enter__()

    def __exit__(self, *error) -> bool | None:
        return self._entered.__exit__(*error)
