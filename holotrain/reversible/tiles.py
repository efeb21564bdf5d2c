"""MLPs in the blocks of any model, a tile of tokens at a time, so that their memory does not grow with the sequence.

A tile is recomputed in the backward, by itself. (Tiled MLPs: ALST, arXiv 2506.13996.)
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from holotrain.reversible.context import has_no_data
from holotrain.reversible.lists_of_blocks import is_list_of_blocks, outermost
from holotrain.reversible.recomputation import checkpointed
from holotrain.reversible.replaced_forward import ReplacedForward
from holotrain.reversible.tiled_loss import language_model, tile_loss
from holotrain.reversible.tokenwise import drops_samples, may_be_tokenwise, require_tile, tiles_of


def tile_modules(model: nn.Module, tile: int) -> list[str]:
    """Takes the MLPs in the blocks of a model, and whatever else works token by token, a tile at a time in training, in place.

    They are found by their structure: at least two linear layers, and else norms, activations and dropout. At the first call
    each is tried on two short pieces, together and one by one; where the results differ, as for attention, it is left alone. A
    second call changes the size. Returns the names of the modules that are tried.
    """
    require_tile(tile)
    untile_modules(model)
    found = {
        f"{name}.{inner}": module
        for name, blocks in outermost(model, is_list_of_blocks)
        for inner, module in blocks.named_modules()
        if "." in inner and may_be_tokenwise(module)
    }
    for module in found.values():
        Tiled(module).tile = tile
    return list(found)


def untile_modules(model: nn.Module) -> None:
    """Takes back what :func:`tile_modules` did."""
    Tiled.remove_all(model)


def take_in_tiles(model: nn.Module, tile: int) -> None:
    """Takes MLPs in tiles, and the loss, if it is a language model of transformers with a head for words; see
    :func:`tile_modules` and :func:`~holotrain.reversible.tiled_loss.tile_loss`."""
    tile_modules(model, tile)
    if language_model(model) is not None:
        tile_loss(model)


class Tiled(ReplacedForward):
    """The forward of a module of (B, T, C), which is taken a tile at a time in training."""

    KEY, WHAT = "_tiled_forward", "tiled modules"
    tile: int
    inside = False
    """Whether a tile is being computed: the modules in it take it whole."""

    def train(self, arguments: tuple, keywords: dict[str, Any]) -> Any:
        x = arguments[0] if len(arguments) == 1 else None
        if Tiled.inside or not isinstance(x, Tensor):
            return self.pass_on(arguments, keywords)
        run = partial(self.own(), **keywords)
        with _inside():
            tiles = tiles_of(self.module, self.tile, x, keywords)
        if not tiles or drops_samples(self.module):
            return run(x)
        run, outputs = partial(checkpointed, self.module, forward=_inside()(run)), []
        sizes, skipped = [part.stop - part.start for part in tiles], None
        if has_no_data(x) and len(tiles) > 3:  # a plan, in which these need no more than the two before them
            sizes, skipped = [*sizes[:2], sum(sizes[2:-1]), sizes[-1]], 2
        for place, part in enumerate(torch.unsafe_split_with_sizes(x, sizes, 1)):
            part = part.contiguous()
            outputs.append(_SkippedTiles.apply(part, outputs[0]) if place == skipped else run(part))
        return torch.cat(outputs, 1)


class _SkippedTiles(torch.autograd.Function):
    """Stands in a plan for several tiles: holds what they hold, and computes nothing."""

    @staticmethod
    def forward(ctx, x: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return other.new_empty(*x.shape[:2], *other.shape[2:])

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # ty: ignore[incompatible-method-override]
        return torch.empty_like(ctx.saved_tensors[0]), None


@contextmanager
def _inside() -> Generator[None]:
    before, Tiled.inside = Tiled.inside, True
    try:
        yield
    finally:
        Tiled.inside = before
