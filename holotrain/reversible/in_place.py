"""Changes the blocks of any model in place: makes them reversible, or has them run again in the backward, and back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from holotrain.numeric import counted
from holotrain.reversible.block import ReversibleBlock
from holotrain.reversible.checks import RebuildChecks
from holotrain.reversible.lists_of_blocks import named_blocks
from holotrain.reversible.recomputation import checkpointed
from holotrain.reversible.replaced_forward import ReplacedForward, call_of
from holotrain.reversible.sequence import AveragedStreams, ReversibleSequence
from holotrain.reversible.stack import ReversibleStack, stacks_in
from holotrain.reversible.tiled_loss import TiledLoss
from holotrain.reversible.tiles import Tiled, take_in_tiles
from holotrain.reversible.tokenwise import require_tile
from holotrain.schedules import PLAIN

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
            sequence = AveragedStreams(coupled, backward, store, keep=keep, on_mismatch=on_mismatch, tile=tile)
            sequence.replaced = (modules[name],)
            _replace(modules, name, sequence)
    if tile is not None:
        take_in_tiles(model, tile)
    return model


def undo(model: nn.Module) -> nn.Module:
    """Takes back what :func:`make_reversible` and :func:`~holotrain.reversible.recompute` did to a model, in place.

    The weights stay as they are trained.
    """
    for kind in (Tiled, TiledLoss, RecomputedForward):
        kind.remove_all(model)
    for stack in stacks_in(model):
        stack.remove()
    for part in list(model.modules()):
        for child, module in list(part.named_children()):
            streams = module[0] if isinstance(module, nn.ModuleList) and len(module) == 1 else module
            if isinstance(streams, AveragedStreams) and streams.replaced:
                setattr(part, child, streams.replaced[0])
    return model


def checks_in(model: nn.Module) -> list[RebuildChecks]:
    """The checks of all reversible sequences and stacks in a model."""
    sequences = (module for module in model.modules() if isinstance(module, ReversibleSequence))
    return [each.checks for each in (*sequences, *stacks_in(model))]


def _require_each_once(lists: Sequence[dict[str, nn.Module]]) -> None:
    places: dict[int, str] = {}
    for place, block in (each for blocks in lists for each in blocks.items()):
        if (other := places.get(id(block))) == place:
            raise ValueError(f"{place} is in two lists, and a block cannot have two places in a stack")
        if places.setdefault(id(block), place) != place:
            raise ValueError(f"{other} and {place} are one block, and a block cannot have two places in a stack")


def _replace(modules: dict[str, nn.Module], name: str, streams: AveragedStreams) -> None:
    parent, _, last = name.rpartition(".")
    # A model that loops over a ModuleList still does, over one element.
    setattr(modules[parent], last, nn.ModuleList([streams]) if isinstance(modules[name], nn.ModuleList) else streams)


class RecomputedForward(ReplacedForward):
    """The ``forward`` of a block that runs again in the backward.

    Attributes:
        backward: one of :data:`~holotrain.schedules.PLAIN`. It may be changed between calls.
    """

    KEY, WHAT = "_recomputed_forward", "recomputed blocks"
    backward = "autograd"

    def train(self, arguments: tuple, keywords: dict[str, Any]) -> Any:
        if self.backward == "autograd":
            return self.pass_on(arguments, keywords)
        x, run, rest = call_of(self.own(), arguments, keywords, again=True)
        if not isinstance(x, Tensor):
            x, run, rest = _within(x, run, rest)
        if x is None:
            return self.pass_on(arguments, keywords)
        return checkpointed(self.module, x, backward=self.backward, forward=run, **rest)


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
    """Has a block recomputed in the backward, or stores its activations again (``"autograd"``), in place."""
    require_way(backward)
    forward = RecomputedForward.of(block)
    if backward == "autograd":
        if forward is not None:
            forward.remove()
        return
    forward = forward or RecomputedForward(block)
    forward.backward = backward


def require_way(backward: str) -> None:
    if backward not in PLAIN:
        raise ValueError(f"backward must be one of {', '.join(PLAIN)}, not {backward!r}")


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
        backward: how each block's input is kept, one name of :data:`~holotrain.schedules.PLAIN` or one for each block. Where
            it is inexact, the forward does not change; the gradients are those of the rounded inputs.
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
