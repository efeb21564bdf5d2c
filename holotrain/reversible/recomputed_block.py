"""A block of any model that runs again in the backward, from what is kept of its input."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from holotrain.reversible.kept_inputs import WAYS
from holotrain.reversible.recomputation import checkpointed
from holotrain.reversible.stack import call_of

STORED = "autograd"


class RecomputedForward:
    """The ``forward`` of a block that runs again in the backward. In ``eval()`` and without gradients it is the block's own.

    Args:
        block: whose forward it becomes.

    Attributes:
        backward: ``"autograd"``, or one of :data:`~holotrain.reversible.kept_inputs.WAYS`. It may be changed between calls.
    """

    backward = STORED

    def __init__(self, block: nn.Module) -> None:
        self._block, self._own = block, vars(block).get("forward")
        block.forward = vars(block)["_recomputed_forward"] = self  # others may wrap the first
        block._replicate_for_data_parallel = self.refuse_replica

    def remove(self) -> None:
        """Gives the block its own forward back. Where something wrapped this one, it runs the block's own."""
        self.backward, block = STORED, self._block
        del block._replicate_for_data_parallel
        if vars(block).pop("_recomputed_forward") is not block.forward:
            return
        del block.forward
        if self._own is not None:
            block.forward = self._own

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        block, own = self._block, self._own_forward()
        if self.backward == STORED or not (block.training and torch.is_grad_enabled()):
            return own(*arguments, **keywords)
        x, run, words = call_of(own, arguments, keywords, again=True)
        if not isinstance(x, Tensor):
            x, run, words = _within(x, run, words)
        if x is None:
            return own(*arguments, **keywords)
        return checkpointed(block, x, backward=self.backward, forward=run, **words)

    def _own_forward(self) -> Callable:
        return self._own or MethodType(type(self._block).forward, self._block)

    def refuse_replica(self) -> nn.Module:
        """What ``nn.DataParallel`` calls to copy the block.

        Raises:
            ValueError: always; the copy would run the parts of this block.
        """
        raise ValueError(
            "nn.DataParallel would run the recomputed blocks of its first GPU on every GPU; start one process for each GPU "
            "with torchrun, or call undo(model)"
        )

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._own_forward())


def _within(stream: Any, run: Callable, words: dict[str, Any]) -> tuple[Tensor | None, Callable, dict[str, Any]]:
    """The same call, with the first floating-point tensor in a list or dict of streams as its stream; None: there is none."""
    leaves, spec = tree_flatten(stream)
    place = next((i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)
    if place is None:
        return None, run, words

    def run_within(x: Tensor, others: list[Any], **words: Any) -> Any:
        return run(tree_unflatten([*others[:place], x, *others[place:]], spec), **words)

    return leaves.pop(place), run_within, {**words, "others": leaves}


def recomputed_forward_of(block: nn.Module) -> RecomputedForward | None:
    """The forward of a block that is recomputed; None: it is not."""
    return vars(block).get("_recomputed_forward")


def recompute_block(block: nn.Module, backward: str) -> None:
    """Has a block recomputed in the backward, or stores its activations again (``"autograd"``), in place.

    Raises:
        ValueError: no such schedule.
    """
    require_way(backward)
    forward = recomputed_forward_of(block)
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
