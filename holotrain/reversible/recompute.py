"""Recomputes the blocks of any model in the backward, in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from holotrain.numeric import counted
from holotrain.reversible.block import ReversibleBlock
from holotrain.reversible.block_calls import call_of
from holotrain.reversible.kept_inputs import WAYS
from holotrain.reversible.lists_of_blocks import named_blocks
from holotrain.reversible.recomputation import checkpointed
from holotrain.reversible.replaced_forward import ReplacedForward
from holotrain.reversible.tiles import take_in_tiles
from holotrain.reversible.tokenwise import require_tile

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
        x, run, rest = call_of(own, arguments, keywords, again=True)
        if not isinstance(x, Tensor):
            x, run, rest = _within(x, run, rest)
        if x is None:
            return own(*arguments, **keywords)
        return checkpointed(block, x, backward=self.backward, forward=run, **rest)


def _within(stream: Any, run: Callable, rest: dict[str, Any]) -> tuple[Tensor | None, Callable, dict[str, Any]]:
    """The same call, with the first floating-point tensor in a list or dict of streams as its stream; None: there is none."""
    leaves, spec = tree_flatten(stream)
    place = next((i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)
    if place is None:
        return None, run, rest

    def run_within(x: Tensor, others: list[Any], **rest: Any) -> Any:
        return run(tree_unflatten([*others[:place], x, *others[place:]], spec), **rest)

    return leaves.pop(place), run_within, {**rest, "others": leaves}


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


def recompute(
    model: nn.Module,
    blocks: str | Sequence[str] | None = None,
    *,
    backward: str | Sequence[str] = "checkpoint",
    tile: int | None = None,
) -> nn.Module:
    """Has a stack of blocks keep only their inputs in training, and run again in the backward, in place.

    The model stays what it is: its parameters, its ``state_dict`` and what it computes, also in training::

        model = recompute(AutoModelForCausalLM.from_pretrained("gpt2"), "transformer.h", backward="checkpoint8")

    A second call changes the schedules. ``undo(model)`` takes it back.

    Args:
        model: any module.
        blocks: as :func:`~holotrain.reversible.make_reversible` takes them: names of lists of blocks, or parts of lists.
        backward: how each block's input is kept, one name or one for each block:

            - ``"checkpoint"``: as it is;
            - ``"checkpoint8"``: rounded to 8 bits. The forward does not change; the gradients are those of the rounded inputs;
            - ``"offload"``: copied to main memory while the block computes, and fetched ahead of its turn in the backward. On a
              CPU, and where memory cannot be pinned, it is ``"checkpoint"``;
            - ``"autograd"``: the block stores all its activations.
        tile: as :func:`~holotrain.reversible.make_reversible` takes it.

    Returns:
        the model.

    Raises:
        ValueError: the model has no such list of blocks, or several lists and none is named; the blocks are reversible; an
            unknown or a wrong number of schedules.
    """
    require_tile(tile)
    lists = named_blocks(model, blocks, "recompute").values()
    found = list({id(block): block for each in lists for block in each.values()}.values())
    schedules = [backward] * len(found) if isinstance(backward, str) else list(backward)
    if len(schedules) != len(found):
        raise ValueError(f"backward lists {counted(len(schedules), 'schedule')} for {counted(len(found), 'block')}")
    for schedule in schedules:
        require_way(schedule)
    if any(isinstance(block, ReversibleBlock) for block in found):
        raise ValueError("the blocks are those of a ReversibleSequence, which has a backward of its own: set sequence.backward")
    for block, schedule in zip(found, schedules, strict=True):
        recompute_block(block, schedule)
    if tile is not None:
        take_in_tiles(model, tile)
    return model
