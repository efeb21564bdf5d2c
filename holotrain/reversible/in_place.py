"""Has the blocks of any model run again in the backward, in place, and takes that back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from holotrain.numeric import counted
from holotrain.reversible.block_inputs import WAYS
from holotrain.reversible.chunks import ChunkedForward, train_in_chunks
from holotrain.reversible.coupling import ReversibleBlock
from holotrain.reversible.head_groups import HeadGroups, take_heads
from holotrain.reversible.lists_of_blocks import named_blocks
from holotrain.reversible.replaced_forward import ReplacedForward, call_of, is_cache
from holotrain.reversible.schedule import checkpointed
from holotrain.reversible.tiled_loss import TiledLoss
from holotrain.reversible.tiles import Tiled, take_in_tiles
from holotrain.schedules import COMPILED, PLAIN, kind_of


def recompute(
    model: nn.Module,
    blocks: str | Sequence[str] | None = None,
    *,
    backward: str | Sequence[str] = "checkpoint",
    tile: int | Mapping[str, int] | None = None,
    chunk: int | None = None,
    keys: str = "device",
    heads: int | None = None,
) -> nn.Module:
    """Has a stack of blocks keep only their inputs in training, and run again in the backward, in place.

    The model stays what it is: its parameters, its ``state_dict`` and what it computes, also in training::

        model = recompute(AutoModelForCausalLM.from_pretrained("gpt2"), "transformer.h", backward="checkpoint8")

    A second call changes the schedules. ``undo(model)`` takes it back.

    Args:
        model: any module.
        blocks: dotted name of the ``nn.ModuleList`` or ``nn.Sequential`` that holds the blocks, or several names. It may end
            with a slice, as in ``"stages.1.blocks[1:]"``. None: the one list of blocks that the model has, or all of them if
            all hold blocks of one class.
        backward: how each block's input is kept, one name of :data:`~holotrain.schedules.PLAIN` or one for each block. Where
            it is inexact, the forward does not change; the gradients are those of the rounded inputs. ``"compiled:0.3"`` has
            a memory budget, see :mod:`holotrain.reversible.compiled`. ``"chunks"``: blocks store everything, of one chunk.
        tile: tokens of each row that MLPs take at a time, also as part of a block that runs again; or a mapping from names of
            modules, such as ``"layers.*.mlp"``, to tokens, for modules that you know to keep tokens apart; see
            :func:`~holotrain.reversible.tiles.tile_modules`. In language models of transformers, the head and the loss of
            ``model(input_ids, labels=labels)`` are then taken in tiles, too, and ``logits`` is None in training; see
            :mod:`holotrain.reversible.tiled_loss`. None: all tokens at once.
        chunk: tokens of a sequence that a causal language model of transformers takes at a time, under any ``backward``; see
            :func:`~holotrain.reversible.train_in_chunks`. It stays until :func:`undo`. None: chosen for ``"chunks"``, else all.
        keys: where chunks keep keys and values: on the ``"device"``, or on the ``"host"``, in main memory.
        heads: of keys and values that attention takes at a time, also as part of a block that runs again; see
            :func:`~holotrain.reversible.head_groups.take_heads`. It stays until :func:`undo`. None: all heads at once.

    Returns:
        the model.

    Raises:
        ValueError: the model has no such list of blocks, or several lists and none is named; the blocks are reversible; an
            unknown or a wrong number of schedules.
    """
    in_chunks = chunk is not None or backward == "chunks"
    if keys != "device" and not in_chunks:
        raise ValueError(f'keys={keys!r} is for chunks: give chunk, or backward="chunks"')
    backward = "autograd" if backward == "chunks" else backward
    chosen = named_blocks(model, blocks)
    schedules = [backward] * len(chosen) if isinstance(backward, str) else list(backward)
    if len(schedules) != len(chosen):
        raise ValueError(f"backward lists {counted(len(schedules), 'schedule')} for {counted(len(chosen), 'block')}")
    for schedule in schedules:
        require_plain(schedule)
        if kind_of(schedule) in COMPILED and (tile is not None or heads is not None or in_chunks):
            raise ValueError(f'{schedule} blocks take no tile, heads and chunk; use backward="{COMPILED[kind_of(schedule)]}"')
    if any(isinstance(block, ReversibleBlock) for block in chosen):
        raise ValueError("the blocks are those of a ReversibleSequence, which has a backward of its own: set sequence.backward")
    if tile is not None:
        take_in_tiles(model, tile)
    if heads is not None:
        take_heads(model, heads)
    if in_chunks:
        train_in_chunks(model, chunk, keys)
    for block, schedule in zip(chosen, schedules, strict=True):
        recompute_block(block, schedule)
    return model


def undo(model: nn.Module) -> nn.Module:
    """Takes back what :func:`recompute` did to a model, in place. The weights stay as they are trained."""
    for kind in (ChunkedForward, Tiled, HeadGroups, TiledLoss, RecomputedForward):
        kind.remove_all(model)
    return model


def require_plain(backward: str) -> None:
    """Raises a ValueError if this is no schedule of blocks that are not reversible."""
    if kind_of(backward) not in PLAIN:
        raise ValueError(f"backward must be one of {', '.join(PLAIN)} or chunks, not {backward!r}")


def recompute_block(block: nn.Module, backward: str) -> None:
    """Has a block recomputed in the backward, or stores its activations again (``"autograd"``), in place."""
    require_plain(backward)
    forward = RecomputedForward.of(block)
    if backward == "autograd":
        if forward is not None:
            forward.remove()
        return
    forward = forward or RecomputedForward(block)
    forward.backward = backward


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
        if not self.module.training and any(map(is_cache, (*arguments, *keywords.values()))):  # maybe it generates
            return self.pass_on_in_eval(arguments, keywords)
        self._take_from_transformers()
        x, run, rest = call_of(self.own(), arguments, keywords)
        if not isinstance(x, Tensor):
            x, run, rest = _within(x, run, rest)
        if x is None:
            return self.pass_on(arguments, keywords)
        forward = partial(self._run, run) if self.backward in WAYS else run
        return checkpointed(self.module, x, backward=self.backward, forward=forward, **rest)

    def _run(self, run: Callable, x: Tensor, **rest: Any) -> Any:
        self._take_from_transformers()  # whose checkpointing may have been switched on since the forward, as TRL does
        return run(x, **rest)

    def _take_from_transformers(self) -> None:
        """Switches off its own checkpointing of this block, which would run a third time."""
        if getattr(type(self.module), "gradient_checkpointing", None) is False:
            vars(self.module).pop("gradient_checkpointing", None)


def _within(stream: Any, run: Callable, rest: dict[str, Any]) -> tuple[Tensor | None, Callable, dict[str, Any]]:
    """The same call, with the first floating-point tensor in a list or dict of streams as its stream; None: there is none."""
    leaves, spec = tree_flatten(stream)
    place = next((i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)
    if place is None:
        return None, run, rest

    def run_within(x: Tensor, leaves: list[Any], **rest: Any) -> Any:
        return run(tree_unflatten([*leaves[:place], x, *leaves[place:]], spec), **rest)

    return leaves.pop(place), run_within, {**rest, "leaves": leaves}
