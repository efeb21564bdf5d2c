"""The sequences of blocks in a model, the backward schedule of each block, and torch.compile, block by block."""

from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any, cast

from torch import nn

from holotrain.models.layers.blocks import ResidualBlock, ResidualSequence, stored_by_stage
from holotrain.models.mvit import Transition
from holotrain.numeric import counted
from holotrain.reversible import ReversibleBlock, ReversibleSequence
from holotrain.reversible.chunks import ChunkedForward
from holotrain.reversible.compiled import options_of
from holotrain.reversible.fused import compile_branch
from holotrain.reversible.in_place import RecomputedForward, recompute_block
from holotrain.reversible.lists_of_blocks import is_list_of_blocks, outermost
from holotrain.reversible.reads import is_compiled
from holotrain.reversible.replaced_forward import InParts
from holotrain.reversible.tiles import tile_modules, untile_modules
from holotrain.schedules import COMPILED, PLAIN, kind_of

Run = ReversibleSequence | ResidualSequence


def sequences(model: nn.Module) -> list[Run]:
    """The model's sequences of blocks, first to last; not those inside a block of another sequence."""
    return [cast(Run, module) for _, module in outermost(model, lambda module: isinstance(module, Run))]


def schedule_blocks(model: nn.Module, schedules: Sequence[str]) -> None:
    """Sets the schedule of every block.

    Args:
        schedules: one for each block, over all sequences, first to last; in a model without any, over :func:`listed_blocks`.

    Raises:
        ValueError: the number of schedules is not that of the blocks, or a block cannot have its schedule.
    """
    runs = sequences(model)
    listed = [] if runs else listed_blocks(model)
    depth = sum(len(run.blocks) for run in runs) + len(listed)
    if len(schedules) != depth:
        raise ValueError(f"{counted(len(schedules), 'schedule')} for {counted(depth, 'block')}")
    left = iter(schedules)
    for run in runs:
        run.backward = list(islice(left, len(run.blocks)))
    for block, schedule in zip(listed, left, strict=True):
        recompute_block(block, schedule)


def listed_blocks(model: nn.Module) -> list[nn.Module]:
    """The equal blocks in ModuleLists and Sequentials of a model without sequences, first to last: they can be recomputed."""
    blocks = (block for _, found in outermost(model, is_list_of_blocks) for block in found.children())
    return list({id(block): block for block in blocks}.values())  # a block may be in a list twice


def set_backward(
    model: nn.Module, backward: str, store: int | Collection[int] = 0, keep: Collection[str] = (), tile: int | None = None
) -> None:
    """Sets one schedule for all blocks of a model that has sequences of blocks, or a list of equal blocks, in place.

    Args:
        backward, store, keep, tile: as :class:`~holotrain.reversible.ReversibleSequence` takes them, with ``store`` counted
            over all sequences; see :func:`set_tile`. Equal blocks in a ModuleList or Sequential of the model's take what
            :func:`~holotrain.reversible.recompute` takes.

    Raises:
        ValueError: the model has no blocks, or they cannot have this schedule.
    """
    runs = sequences(model)
    name = type(model).__name__
    set_tile(model, tile)
    if not runs:
        if kind_of(backward) not in PLAIN or store or keep:
            raise ValueError(f"{name} has no reversible blocks; only {', '.join(PLAIN)} are possible")
        depth = len(listed_blocks(model))
        if not depth and backward != "autograd":
            raise ValueError(f"{name} has no ModuleList or Sequential of equal blocks to recompute")
        return schedule_blocks(model, [backward] * depth)
    stored = stored_by_stage(store, [len(run.blocks) for run in runs])
    for run, indices in zip(runs, stored, strict=True):
        run.backward = backward
        if isinstance(run, ReversibleSequence):
            run.store, run.keep = indices, tuple(keep)
        elif indices or keep:
            raise ValueError(f"the blocks of {name} are not reversible, so they take no store and keep")


def set_tile(model: nn.Module, tile: int | None) -> None:
    """Takes what works token by token in a model's blocks a tile of tokens at a time, in place.

    Args:
        tile: tokens of a tile, of each row of a batch; None: all.

    Raises:
        ValueError: nothing in the blocks looks as if it worked token by token.
    """
    two_streams = [run for run in sequences(model) if isinstance(run, ReversibleSequence)]
    for run in two_streams:
        run.tile = tile
    if tile is None:
        untile_modules(model)
    elif not two_streams and not tile_modules(model, tile):
        raise ValueError(f"{type(model).__name__} has no blocks with MLPs that work token by token; remove tile")


def compile_blocks(model: nn.Module, **options: Any) -> None:
    """Compiles the two branches of every block, in place; of a model of others its equal blocks, if they are in a list.

    Blocks of the same kind share compiled code, so this takes a fraction of the time of compiling the whole model. It works
    with every backward schedule and does not change the names in the state_dict. Plain blocks that are checkpointed become
    ``"compiled"`` (``"checkpoint8"``: ``"compiled8"``), so that the compiler recomputes them, unless parts are taken in tiles.

    Args:
        options: of ``torch.compile``, such as ``mode="max-autotune-no-cudagraphs"``. A mode with CUDA graphs would overwrite
            what a recomputation has saved; use :class:`~holotrain.reversible.graphs.StepGraphs`.
    """
    for module in model.modules():
        if isinstance(module, ReversibleBlock | ResidualBlock | Transition):
            compile_branch(module.f, **options)
            compile_branch(module.g, **options)
    if any(isinstance(vars(part).get("forward"), InParts | ChunkedForward) for part in model.modules()):
        return
    runs = sequences(model)
    for run in runs:
        if isinstance(run, ResidualSequence):
            names = [each.input if each.kind == "checkpointed" else "autograd" for each in run.schedules]
            run.backward = [_RECOMPUTED_SO.get(name, name) for name in names]
            options_of.update((block, options) for block in run.blocks)
    for block in [] if runs else listed_blocks(model):
        forward = RecomputedForward.of(block)
        name = "autograd" if forward is None else forward.backward
        recompute_block(block, "compiled:1" if name == "autograd" else _RECOMPUTED_SO.get(name, name))
        options_of[block] = options


_RECOMPUTED_SO = {eager: name for name, eager in COMPILED.items()}
"""The schedule by which the compiler does what another does without it."""


def has_compiled_blocks(model: nn.Module) -> bool:
    """Whether a part of a model is compiled, or is to be by its schedule."""
    names = [schedule.input for run in sequences(model) for schedule in run.schedules]
    names += [forward.backward for part in model.modules() if (forward := RecomputedForward.of(part)) is not None]
    return any(map(is_compiled, model.modules())) or any(kind_of(name) in COMPILED for name in names)
