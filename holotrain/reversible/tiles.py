"""MLPs in the blocks of any model, a tile of tokens at a time, so that their memory does not grow with the sequence.

A tile is recomputed in the backward, by itself. (Tiled MLPs: ALST, arXiv 2506.13996.)
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from holotrain.reversible.context import has_no_data, is_captured, may_wait, recomputing
from holotrain.reversible.lists_of_blocks import is_list_of_blocks, outermost
from holotrain.reversible.reads import parts_of
from holotrain.reversible.replaced_forward import InParts, differ
from holotrain.reversible.schedule import checkpointed
from holotrain.reversible.settings import put_back, states_of
from holotrain.reversible.tile_graph import Pieces
from holotrain.reversible.tiled_loss import language_model, tile_loss
from holotrain.reversible.tokenwise import attributes_of, put_back_attributes, require_tile, tiles_of, why_whole

_LOGGER = logging.getLogger(__name__)


def tile_modules(model: nn.Module, tile: int | Mapping[str, int]) -> list[str]:
    """Takes the MLPs in the blocks of a model, and whatever else works token by token, a tile at a time in training, in place.

    A second call replaces the first.

    Args:
        tile: tokens of a tile. The candidates are then parts of blocks with at least two matrices of weights, and norms, of
            which :data:`NORMS` times as many are taken. At its first call
            each is looked at (:mod:`holotrain.reversible.tokenwise`), and left alone if it may mix tokens, as attention does;
            the reason is logged. Or a mapping from patterns of names, such as ``"model.layers.*.mlp"``, to tokens: these
            modules are taken in tiles without being looked at.

    Returns:
        the names of the candidates.

    Raises:
        ValueError: a wrong number of tokens, or no module has a name of such a pattern.
    """
    candidates = _named(model, tile) if isinstance(tile, Mapping) else _candidates(model, tile)
    untile_modules(model)
    said: set[str] = set()
    for module, size in candidates.values():
        tiled = Tiled(module)
        tiled.tile, tiled.trusted, tiled.said = size, isinstance(tile, Mapping), said
    return list(candidates)


def _candidates(model: nn.Module, tile: int) -> dict[str, tuple[nn.Module, int]]:
    require_tile(tile)
    found = {}
    for name, blocks in outermost(model, is_list_of_blocks):
        for inner, module in blocks.named_modules():
            if "." in inner and sum(weight.ndim == 2 for weight in module.parameters()) >= 2:
                found[f"{name}.{inner}"] = module, tile
            elif inner.count(".") == 1 and _is_norm(module):
                found[f"{name}.{inner}"] = module, NORMS * tile
    return found


NORMS = 8
"""A norm takes the tokens of so many tiles: it holds less of a token than an MLP, and its tiles are soon computed."""


def _is_norm(module: nn.Module) -> bool:
    """Whether it may be a norm of several operators, which keeps several streams; torch's layer norm keeps its input alone."""
    weights = [weight.ndim for weight in module.parameters()]
    return bool(weights) and {*weights} == {1} and not any(module.children()) and not isinstance(module, nn.LayerNorm)


def _named(model: nn.Module, tiles: Mapping[str, int]) -> dict[str, tuple[nn.Module, int]]:
    found = {}
    for pattern, tile in tiles.items():
        require_tile(tile)
        named = {name: (module, tile) for name, module in model.named_modules() if fnmatchcase(name, str(pattern))}
        if not named:
            example = next(iter(_candidates(model, 1)), "layers.0.mlp")
            raise ValueError(f"tile: {type(model).__name__} has no module of the name {pattern!r}; give such as {example!r}")
        found |= named
    return found


def untile_modules(model: nn.Module) -> None:
    """Takes back what :func:`tile_modules` did."""
    Tiled.remove_all(model)


def take_in_tiles(model: nn.Module, tile: int | Mapping[str, int]) -> None:
    """Takes MLPs in tiles, and the loss, if it is a language model of transformers with a head for words; see
    :func:`tile_modules` and :func:`~holotrain.reversible.tiled_loss.tile_loss`."""
    tile_modules(model, tile)
    if language_model(model) is not None:
        tile_loss(model)


_inside: ContextVar[bool] = ContextVar("inside a tile", default=False)
"""Whether a tile is being computed: the modules in it take it whole."""


@contextmanager
def _within_a_tile() -> Generator[None]:
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


class Tiled(InParts):
    """The forward of a module of (B, T, C), which is taken a tile at a time in training.

    Attributes:
        tile: its tokens.
        trusted: somebody named the module, so it is not looked at.
    """

    KEY, WHAT, PARTS = "_tiled_forward", "tiled modules", "tiles"
    tile: int
    trusted: bool

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self._mixes = False

    def train(self, arguments: tuple, keywords: dict[str, Any]) -> Any:
        x: Any = arguments[0] if len(arguments) == 1 else None
        if _inside.get() or self._mixes or not self._may_cut(x, keywords):
            return self.pass_on(arguments, keywords)
        run = partial(checkpointed, self.module, forward=partial(self._run_tile, keywords))
        tiles, skipped, pieces = tiles_of(x, self.tile), None, Pieces(x)
        if has_no_data(x) and len(tiles) > 3:  # a plan, in which these need no more than the two before them
            skipped = slice(tiles[2].start, tiles[-1].start)
            tiles = [*tiles[:2], skipped, tiles[-1]]
        parts = torch.unsafe_split_with_sizes(x.detach(), [tile.stop - tile.start for tile in tiles], 1)
        for tile, part in zip(tiles, parts, strict=True):
            given = pieces.read(part.contiguous(), tile)
            pieces.write(_SkippedTiles.apply(given, pieces.written) if tile is skipped else run(given), tile)
        return pieces.joined()

    def _run_tile(self, keywords: dict[str, Any], part: Tensor) -> Any:
        with _within_a_tile():
            return self.own()(part, **keywords)

    def _may_cut(self, x: Any, keywords: dict[str, Any]) -> bool:
        reason: str | None = "it is not called with one tensor"
        if isinstance(x, Tensor):
            with _within_a_tile():
                reason = why_whole(self.module, self.tile, x, keywords, self.trusted)
        if reason is not None:
            self.say(reason, _LOGGER.info)
            return False
        if recomputing() or has_no_data(x) or is_captured(x.device):
            return True
        if self.is_compared():
            with may_wait(x.device):
                self._mixes = not self._keeps_apart(x, keywords)
        if self._mixes:
            self.say("its first two tiles have other results by themselves", partial(warnings.warn, stacklevel=5))
        return not self._mixes

    @torch.no_grad()
    def _keeps_apart(self, x: Tensor, keywords: dict[str, Any]) -> bool:
        """Whether the first two tiles give the same by themselves as together; unknown, so True, if it draws numbers."""
        states = states_of(x.device)
        parts = parts_of(self.module) if self.trusted else []  # others are known to change nothing
        attributes = attributes_of(parts)
        buffers = [(buffer, buffer.clone()) for part in parts for buffer in part.buffers(recurse=False)]
        together = self._run_tile(keywords, x[:, : 2 * self.tile].contiguous())
        draws = any(before[2] != source.read()[2] for before, (source, *_) in zip(states, states, strict=True))
        tiles = (
            [] if draws else [self._run_tile(keywords, tile.contiguous()) for tile in x[:, : 2 * self.tile].split(self.tile, 1)]
        )
        put_back(states)
        put_back_attributes(attributes)
        for buffer, before in buffers:
            if not torch.equal(buffer, before):
                buffer.copy_(before)
        if draws:
            return True
        if not isinstance(together, Tensor) or together.shape[:2] != (len(x), min(2 * self.tile, x.shape[1])):
            return False
        return not differ(torch.cat(tiles, 1), together)


class _SkippedTiles(torch.autograd.Function):
    """Stands in a plan for several tiles: holds what they hold, and computes nothing."""

    @staticmethod
    def forward(ctx, x: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return other.new_empty(()).expand(*x.shape[:2], *other.shape[2:])

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # ty: ignore[incompatible-method-override]
        (x,) = ctx.saved_tensors
        return x.new_empty(()).expand_as(x), None
