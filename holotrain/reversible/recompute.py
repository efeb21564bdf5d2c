"""Recomputes the blocks of any model in the backward, in place."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from holotrain.numeric import counted
from holotrain.reversible.block import ReversibleBlock
from holotrain.reversible.make_reversible import named_blocks
from holotrain.reversible.recomputed_block import recompute_block, require_way
from holotrain.reversible.tiles import take_in_tiles
from holotrain.reversible.tokenwise import require_tile


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
