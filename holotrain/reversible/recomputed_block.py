"""A block of any model that runs again in the backward, from what is kept of its input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from holotrain.reversible.block_calls import call_of
from holotrain.reversible.kept_inputs import WAYS
from holotrain.reversible.recomputation import checkpointed
from holotrain.reversible.replaced_forward import ReplacedForward

STORED = "autograd"


class RecomputedForward(ReplacedForward):
    """The ``forward`` of a block that runs again in the backward. In ``eval()`` and without gradients it is the block's own.

    Attributes:
        backward: ``"autograd"``, or one of :data:`~holotrain.reversible.kept_inputs.WAYS`. It may be changed between calls.
    """

    KEY, WHAT = "_recomputed_forward", "recomputed blocks"
    backward = STORED

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        block, own = self.module, self.own()
        if self.removed or self.backward == STORED or not (block.training and torch.is_grad_enabled()):
            return own(*arguments, **keywords)
        x, run, words = call_of(own, arguments, keywords, again=True)
        if not isinstance(x, Tensor):
            x, run, words = _within(x, run, words)
        if x is None:
            return own(*arguments, **keywords)
        return checkpointed(block, x, backward=self.backward, forward=run, **words)


def _within(stream: Any, run: Callable, words: dict[str, Any]) -> tuple[Tensor | None, Callable, dict[str, Any]]:
    """The same call, with the first floating-point tensor in a list or dict of streams as its stream; None: there is none."""
    leaves, spec = tree_flatten(stream)
    place = next((i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)
    if place is None:
        return None, run, words

    def run_within(x: Tensor, others: list[Any], **words: Any) -> Any:
        return run(tree_unflatten([*others[:place], x, *others[place:]], spec), **words)

    return leaves.pop(place), run_within, {**words, "others": leaves}


def recompute_block(block: nn.Module, backward: str) -> None:
    """Has a block recomputed in the backward, or stores its activations again (``"autograd"``), in place.

    Raises:
        ValueError: no such schedule.
    """
    require_way(backward)
    forward = RecomputedForward.of(block)
    if backward == STORED:
        if forward is not None:
            forward.remove()
        return
    forward = forward or RecomputedForward(block)
    forward.backward = backward


def require_way(backward: str) -> None:
    """
    Raises:
        ValueError: no such schedule.
    """
    if backward not in (STORED, *WAYS):
        raise ValueError(f"backward must be one of {', '.join((STORED, *WAYS))}, not {backward!r}")
