"""Makes the blocks of any model reversible, in place."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor, nn

from holotrain.numeric import counted
from holotrain.reversible.block import ReversibleBlock
from holotrain.reversible.checks import RebuildChecks
from holotrain.reversible.lists_of_blocks import the_lists
from holotrain.reversible.recomputed_block import RecomputedForward, recompute_block
from holotrain.reversible.sequence import ReversibleSequence
from holotrain.reversible.stack import ReversibleStack, stack_of, stacks_in
from holotrain.reversible.tiles import take_in_tiles, take_whole
from holotrain.reversible.tokenwise import require_tile

_PART = re.compile(r"(.+)\[(-?\d*):(-?\d*)\]")
"""A part of a list of blocks, such as layers[1:]."""

Split = Callable[[nn.Module], tuple[nn.Module, nn.Module]]


def make_reversible(
    model: nn.Module,
    blocks: str | Sequence[str] | None = None,
    *,
    bits: int | Sequence[int] = 4,
    split: Split | None = None,
    backward: str | Sequence[str] = "reversible",
    store: int | Collection[int] = 0,
    keep: str | Collection[str] = (),
    on_mismatch: str = "store",
    tile: int | None = None,
) -> nn.Module:
    """Makes a stack of blocks reversible, in place, so that training keeps almost nothing between them.

    The model stays what it is: its parameters, its ``state_dict`` and what it computes in ``eval()`` do not change. In training
    each block's step is disturbed a little, with a random sign for each sample, such that its input can be rebuilt from its
    output (:mod:`holotrain.reversible.two_step`)::

        model = make_reversible(AutoModelForCausalLM.from_pretrained("gpt2"), "transformer.h")

    Args:
        model: any module.
        blocks: dotted name of the ``nn.ModuleList`` or ``nn.Sequential`` that holds the blocks, or several names. It may end
            with a slice, as in ``"stages.1.blocks[1:]"``, where the first block changes the shape. None: the one list of blocks
            that the model has, or all of them if all hold blocks of one class. A block takes the stream (batch, ...) as its
            first argument and returns a tensor of this shape, or a tuple that begins with one; other arguments are passed on.
            The stream is rebuilt from each block to the next; where the model changes it between two, it is stored.
        bits: bits that are kept for each element and block in the middle of the stack, 1 to 8. Towards both ends it is more,
            up to 6, so that 4 is 4.2 on average in 30 blocks, and 1, 2 and 3 are the same in a stack of four. A list: for each
            block but the first. ``stack_of(block)`` prints what is kept. With 2 and 1 the training is further from the model's.
        split: returns the two residual branches of a block (attention and MLP, each with its norm) as modules of one argument.
            The blocks are then replaced by a :class:`ReversibleSequence` of two streams, which keeps nothing at all. That is
            another network with the same weights, to be trained anew.
        backward, store, keep, on_mismatch: as :class:`ReversibleSequence` takes them, with the blocks of each list counted by
            themselves; ``backward="autograd"`` stores everything and computes the same.
        tile: tokens of each row that MLPs take at a time, also as part of a block that runs again. In language
            models of transformers, the head and the loss of ``model(input_ids, labels=labels)`` are then taken in tiles, too,
            and ``logits`` is None in training; see :mod:`holotrain.reversible.tiled_loss`. None: all tokens at once.

    Returns:
        the model.

    Raises:
        ValueError: the model has no such list of blocks, or several lists and none is named, or the blocks are reversible
            already, or ``split`` with a part of a list. At the call in training: a block changes the shape.
    """
    require_tile(tile)
    lists, modules = named_blocks(model, blocks, "make_reversible"), dict(model.named_modules(remove_duplicate=False))
    _require_each_once([*lists.values()])
    if any(RecomputedForward.of(block) for found in lists.values() for block in found.values()):
        raise ValueError("the blocks are recomputed already; undo(model) takes that back")
    for name, found in lists.items():
        if split is None:
            ReversibleStack([*found.values()], bits, backward, store, keep, name, on_mismatch)
        elif name not in modules:
            raise ValueError(f"split replaces a whole list of blocks, and {name!r} is a part of one")
        else:
            coupled = [ReversibleBlock(*split(block)) for block in found.values()]
            sequence = ReversibleSequence(coupled, backward, store, keep=keep, on_mismatch=on_mismatch, tile=tile)
            _replace(modules, name, TwoStream(sequence, modules[name]))
    if tile is not None:
        take_in_tiles(model, tile)
    return model


def undo(model: nn.Module) -> nn.Module:
    """Takes back what :func:`make_reversible` and :func:`~holotrain.reversible.recompute` did to a model, in place.

    The weights stay as they are trained.
    """
    take_whole(model)
    for part in model.modules():
        recompute_block(part, "autograd")
    for stack in stacks_in(model):
        stack.remove()
    for part in list(model.modules()):
        for child, module in list(part.named_children()):
            two = module[0] if isinstance(module, nn.ModuleList) and len(module) == 1 else module
            if isinstance(two, TwoStream):
                setattr(part, child, two.replaced[0])
    return model


def checks_in(model: nn.Module) -> list[RebuildChecks]:
    """The checks of all reversible sequences and stacks in a model."""
    sequences = (module for module in model.modules() if isinstance(module, ReversibleSequence))
    return [each.checks for each in (*sequences, *stacks_in(model))]


class TwoStream(nn.Module):
    """A reversible sequence with one input and one output: both streams start as the input, the output is their mean.

    Keyword arguments are passed to every f. Shapes: (...) -> the same.

    Args:
        replaced: the list of blocks in whose place it stands.
    """

    def __init__(self, sequence: ReversibleSequence, replaced: nn.Module) -> None:
        super().__init__()
        self.sequence = sequence
        self.replaced = (replaced,)  # no submodule

    def forward(self, x: Tensor, **f_kwargs: Any) -> Tensor:
        y1, y2 = self.sequence(x, x, f_kwargs=f_kwargs)
        return (y1 + y2) / 2


def named_blocks(model: nn.Module, blocks: str | Sequence[str] | None, taker: str) -> dict[str, dict[str, nn.Module]]:
    """The blocks of some lists by their names, by the name of the list.

    Args:
        blocks: as :func:`make_reversible` takes them.
        taker: the function that takes them, for messages.

    Raises:
        ValueError: the model has no such list, or several and none is named; the blocks are reversible already.
    """
    if isinstance(blocks, nn.Module):
        known = ", ".join(f"{name!r}" for name, part in model.named_modules() if part is blocks) or "such as 'blocks'"
        raise ValueError(f"{taker} takes the name of a list of blocks ({known}), not the list itself")
    modules = dict(model.named_modules(remove_duplicate=False))
    return {name: _blocks_of(name, modules) for name in ([blocks] if isinstance(blocks, str) else blocks or the_lists(model))}


def _blocks_of(name: str, modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """The blocks of a list, or of a part of one, by their names."""
    part = _PART.fullmatch(name)
    whole, *ends = part.groups() if part else (name, "", "")
    found = modules.get(whole)
    if not isinstance(found, nn.Sequential | nn.ModuleList):
        lists = [name for name, part in modules.items() if name and isinstance(part, nn.Sequential | nn.ModuleList)]
        raise ValueError(f"{name!r} is not a list of blocks; the model has {', '.join(lists) or 'none'}")
    places = [f"{whole}.{key}" for key in found._modules]
    blocks = {place: modules[place] for place in places[slice(*(int(end) if end else None for end in ends))]}
    if part and not blocks:
        raise ValueError(f"{name!r} holds none of the {counted(len(places), 'block')} of {whole!r}")
    around = [part for other, part in modules.items() if whole.startswith(f"{other}.")]
    if any(map(stack_of, [*blocks.values(), *around])) or isinstance(next(iter(found), None), TwoStream):
        raise ValueError(f"the blocks {name!r} are reversible already; undo(model) takes that back")
    return blocks


def _require_each_once(lists: Sequence[dict[str, nn.Module]]) -> None:
    places: dict[int, str] = {}
    for place, block in (each for blocks in lists for each in blocks.items()):
        if (other := places.get(id(block))) == place:
            raise ValueError(f"{place} is in two lists, and a block cannot have two places in a stack")
        if places.setdefault(id(block), place) != place:
            raise ValueError(f"{other} and {place} are one block, and a block cannot have two places in a stack")


def _replace(modules: dict[str, nn.Module], name: str, stream: TwoStream) -> None:
    parent, _, last = name.rpartition(".")
    # A model that loops over a ModuleList still does, over one element.
    setattr(modules[parent], last, nn.ModuleList([stream]) if isinstance(modules[name], nn.ModuleList) else stream)
