"""The decoder blocks of a causal model of transformers, apart from what it computes before and after them.

The model's own forward computes masks, positions, norm and head, with its blocks replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from holotrain.reversible.lists_of_blocks import the_lists
from holotrain.reversible.replaced_forward import call_of, forward_replaced, stream_in
from holotrain.reversible.tokenwise import without_dropout
from holotrain.targets import first_line

TOKENS = 3
"""With so many it is tried whether a model can be divided."""


Call = tuple[Tensor, Callable, dict[str, Any]]
"""Of a block, as :func:`~holotrain.reversible.replaced_forward.call_of` returns it."""


class DecoderBlocks:
    """
    Args:
        model: a causal model of transformers. It is tried on a few tokens.

    Attributes:
        blocks: first to last.
        before, after: the other modules with parameters, called before or after the blocks; some may be in both.
        width: channels of the stream.

    Raises:
        ValueError: the model has no list of blocks or several, a block reads more than the stream of the block before and
            what depends on no parameter, or the parts together do not compute what the model does.
    """

    def __init__(self, model: Any) -> None:
        self.model, names = model, the_lists(model)
        if len(names) > 1:
            raise ValueError(f"{type(model).__name__} has several lists of blocks: {', '.join(names)}")
        self.blocks = list(model.get_submodule(names[0]))
        inside = {part for block in self.blocks for part in block.modules()}
        parts = [part for part in model.modules() if part not in inside and part._parameters]
        self._widths: dict[nn.Module, int] = {}  # of what is called, and what it returns
        tokens = torch.arange(TOKENS, device=next(model.parameters()).device)[None]
        try:
            with without_dropout(model):
                called, expected = self._tried(parts, tokens)
                self.after = list(dict.fromkeys([*called[-1], model.get_output_embeddings()]))
                self.before = [part for part in parts if part in called[0] or part not in self.after]
                self._require_same(tokens, expected)
        except Exception as error:  # of many kinds
            raise ValueError(f"{type(model).__name__} cannot be divided into stages: {first_line(error)}") from error

    def _tried(self, parts: Sequence[nn.Module], tokens: Tensor) -> tuple[list[list[nn.Module]], Tensor]:
        """The parts that are called when so many blocks have been, and the logits of tokens (1, T)."""
        called: list[list[nn.Module]] = [[] for _ in range(len(self.blocks) + 1)]
        calls: list[Call] = []
        outputs: list[Any] = []

        def before_block(block: nn.Module, arguments: tuple, keywords: dict[str, Any]) -> None:
            calls.append(call_of(block.forward, arguments, keywords, again=False))

        def after_block(block: nn.Module, arguments: tuple, output: Any) -> None:
            outputs.append(output)

        def after_part(part: nn.Module, arguments: tuple, output: Any) -> None:
            called[len(outputs)].append(part)
            self._widths[part] = stream_in(output).shape[-1]

        with ExitStack() as stack:
            for block in self.blocks:
                stack.enter_context(block.register_forward_pre_hook(before_block, with_kwargs=True))
                stack.enter_context(block.register_forward_hook(after_block))
            for part in parts:
                stack.enter_context(part.register_forward_hook(after_part))
            logits = self.model(input_ids=tokens, use_cache=False).logits
        chained = len(calls) == len(outputs) == len(self.blocks) and not any(called[1:-1])
        chained = chained and all(call[0] is stream_in(output) for call, output in zip(calls[1:], outputs, strict=False))
        others = [leaf for call in calls for leaf in tree_leaves(call[2]) if isinstance(leaf, Tensor)]
        if not chained or any(other.requires_grad for other in others):
            raise ValueError("it passes more than one tensor from block to block")
        self.width = calls[0][0].shape[-1]
        self._more = tuple(outputs[0][1:]) if isinstance(outputs[0], tuple | list) else None
        return called, logits

    def _require_same(self, tokens: Tensor, expected: Tensor) -> None:
        """The parts get streams as stages do: leaves, with gradients, that must not be changed in place."""
        stream = self.run(self.blocks, self.enter(tokens).detach().requires_grad_(), tokens)
        with self.left(stream.detach().requires_grad_()):
            logits = self.model(input_ids=torch.ones_like(tokens), use_cache=False).logits
        if not torch.allclose(logits, expected, rtol=1e-3, atol=1e-5):
            raise ValueError("its parts do not compute what it computes")

    @contextmanager
    def replaced(self, idle: Sequence[nn.Module], result: Tensor | None = None) -> Generator[list[Call]]:
        """Inside, a call of the model runs no blocks.

        Args:
            idle: modules that do not run, either: they return zeros.
            result: what the last block returns; None: all return what they get.

        Yields:
            the calls of the blocks, which have not run.
        """
        calls: list[Call] = []

        def record(own: Any, returned: Tensor | None, *arguments: Any, **keywords: Any) -> Tensor | tuple:
            calls.append(call_of(own, arguments, keywords, again=False))
            stream = calls[-1][0] if returned is None else returned
            return stream if self._more is None else (stream, *self._more)

        with ExitStack() as stack:
            for module in idle:
                if module in self._widths:
                    stack.enter_context(forward_replaced(module, partial(_zeros, module, self._widths[module])))
            for block in self.blocks:
                returned = result if block is self.blocks[-1] else None
                stack.enter_context(forward_replaced(block, partial(record, block.forward, returned)))
            yield calls

    def enter(self, tokens: Tensor) -> Tensor:
        """The stream (B, T, C) that the first block reads, of tokens (B, T)."""
        with self.replaced([part for part in self.after if part not in self.before]) as calls:
            self.model(input_ids=tokens, use_cache=False)
        return calls[0][0]

    def run(self, some: Iterable[nn.Module], stream: Tensor, tokens: Tensor) -> Tensor:
        """The stream after some of the blocks."""
        with torch.no_grad(), self.replaced([*self.before, *self.after]) as calls:
            self.model(input_ids=tokens, use_cache=False)
        known = dict(zip(self.blocks, calls, strict=True))
        for block in some:
            others = known[block][2]
            stream = stream_in(block(stream, *others.get("rest", ()), **others.get("named", {})))
        return stream

    @contextmanager
    def left(self, stream: Tensor) -> Generator[None]:
        """Inside, a call of the model begins with the stream after the last block, whatever tokens it gets."""
        with self.replaced([part for part in self.before if part not in self.after], stream):
            yield


def _zeros(module: nn.Module, width: int, /, *arguments: Any, **keywords: Any) -> Tensor:
    """In place of an embedding of tokens (B, T), or a layer that reads (B, T, C)."""
    x = next(each for each in (*arguments, *keywords.values()) if isinstance(each, Tensor))
    shape = x.shape if isinstance(module, nn.Embedding) else x.shape[:-1]
    return x.new_zeros(*shape, width, dtype=next(module.parameters()).dtype)  # which the model may change in place
