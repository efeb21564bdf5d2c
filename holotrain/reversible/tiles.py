"""MLPs in the blocks of any model, a tile of tokens at a time, so that their memory does not grow with the sequence.

A tile is recomputed in the backward, by itself. (Tiled MLPs: ALST, arXiv 2506.13996.)
"""

from __future__ import annotations

from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from holotrain.reversible.context import has_no_data
from holotrain.reversible.lists_of_blocks import is_list_of_blocks, outermost
from holotrain.reversible.recomputation import checkpointed
from holotrain.reversible.replaced_forward import ReplacedForward
from holotrain.reversible.tiled_loss import language_model, tile_loss
from holotrain.reversible.tokenwise import require_tile, tiles_of


def tile_modules(model: nn.Module, tile: int) -> list[str]:
    """Takes the MLPs in the blocks of a model, and whatever else works token by token, a tile at a time in training, in place.

    Candidates are parts of blocks with at least two matrices of weights. At its first call each is looked at
    (:mod:`holotrain.reversible.tokenwise`), and left alone if it may mix tokens, as attention does. A second call changes the
    size. Returns the names of the candidates.
    """
    require_tile(tile)
    untile_modules(model)
    candidates = {
        f"{name}.{inner}": module
        for name, blocks in outermost(model, is_list_of_blocks)
        for inner, module in blocks.named_modules()
        if "." in inner and sum(weight.ndim == 2 for weight in module.parameters()) >= 2
    }
    for module in candidates.values():
        Tiled(module).tile = tile
    return list(candidates)


def untile_modules(model: nn.Module) -> None:
    """Takes back what :func:`tile_modules` did."""
    Tiled.remove_all(model)


def take_in_tiles(model: nn.Module, tile: int) -> None:
    """Takes MLPs in tiles, and the loss, if it is a language model of transformers with a head for words; see
    :func:`tile_modules` and :func:`~holotrain.reversible.tiled_loss.tile_loss`."""
    tile_modules(model, tile)
    if language_model(model) is not None:
        tile_loss(model)


_inside: ContextVar[bool] = ContextVar("inside a tile", default=False)
"""Whether a tile is being computed: the modules in it take it whole."""


class Tiled(ReplacedForward):
    """The forward of a module of (B, T, C), which is taken a tile at a time in training."""

    KEY, WHAT = "_tiled_forward", "tiled modules"
    tile: int

    def train(self, arguments: tuple, keywords: dict[str, Any]) -> Any:
        x = arguments[0] if len(arguments) == 1 else None
        if _inside.get() or not isinstance(x, Tensor):
            return self.pass_on(arguments, keywords)
        token = _inside.set(True)
        try:
            tiles = tiles_of(self.module, self.tile, x, keywords)
        finally:
            _inside.reset(token)
        if not tiles:
            return self.pass_on(arguments, keywords)
        run, outputs = partial(checkpointed, self.module, forward=partial(self._run_tile, keywords)), []
        sizes, skipped = [part.stop - part.start for part in tiles], None
        if has_no_data(x) and len(tiles) > 3:  # a plan, in which these need no more than the two before them
            sizes, skipped = [*sizes[:2], sum(sizes[2:-1]), sizes[-1]], 2
        for place, part in enumerate(torch.unsafe_split_with_sizes(x, sizes, 1)):
            part = part.contiguous()
            outputs.append(_SkippedTiles.apply(part, outputs[0]) if place == skipped else run(part))
        return torch.cat(outputs, 1)

    def _run_tile(self, keywords: dict[str, Any], part: Tensor) -> Any:
        token = _inside.set(True)
        try:
            return self.own()(part, **keywords)
        finally:
            _inside.reset(token)


class _SkippedTiles(torch.autograd.Function):
    """Stands in a plan for several tiles: holds what they hold, and computes nothing."""

    @staticmethod
    def forward(ctx, x: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return other.new_empty(*x.shape[:2], *other.shape[2:])

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # ty: ignore[incompatible-method-override]
        return torch.empty_like(ctx.saved_tensors[0]), None
