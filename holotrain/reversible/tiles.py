"""Tiles of tokens: what works token by token is taken some hundred tokens at a time, so that its memory does not grow with T.

A tile is recomputed in the backward, by itself. (Tiled MLPs: ALST, arXiv 2506.13996.)
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from holotrain.reversible.make_reversible import is_list_of_blocks, outermost
from holotrain.reversible.replay import has_no_data

PROBED = 8
"""Tokens of each of the two pieces on which is tried, once, whether a module works token by token."""

NOT_TOKENWISE = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.RNNBase,
    nn.GroupNorm,
)


def tile_modules(model: nn.Module, tile: int) -> list[str]:
    """Takes the MLPs in the blocks of a model, and whatever else works token by token, a tile at a time in training, in place.

    They are found by their structure: at least two linear layers, and else norms, activations and dropout. At the first call
    each is tried on two short pieces, together and one by one; where the results differ, as for attention, it is left alone.

    Args:
        tile: tokens of a tile, over all rows of a batch.

    Returns:
        the names of the modules that are tried.

    Raises:
        ValueError: ``tile`` is not positive, or the model is in tiles already.
    """
    if tile < 1:
        raise ValueError(f"tile must be a number of tokens, not {tile}")
    found = {
        f"{name}.{inner}": module
        for name, blocks in outermost(model, is_list_of_blocks)
        for inner, module in blocks.named_modules()
        if "." in inner and may_be_tokenwise(module)
    }
    if any(isinstance(vars(module).get("forward"), Tiled) for module in found.values()):
        raise ValueError("the model is in tiles already")
    for module in found.values():
        module.forward = Tiled(module, tile)
    return list(found)


def untile_modules(model: nn.Module) -> None:
    """Takes back what :func:`tile_modules` did."""
    for module in model.modules():
        if isinstance(vars(module).get("forward"), Tiled):
            del module.forward


def may_be_tokenwise(module: nn.Module) -> bool:
    """Whether a module has the parts of an MLP, and none that mixes tokens. What its forward does is not known."""
    leaves = [part for part in module.modules() if not any(part.children())]
    products = sum(any(weight.ndim == 2 for weight in leaf.parameters(False)) for leaf in leaves)
    return products >= 2 and not any(isinstance(leaf, NOT_TOKENWISE) for leaf in leaves)


class Tiled:
    """The forward of a module of (B, T, ...) that is taken a tile at a time where gradients are computed.

    Attributes:
        works: whether the module works token by token; None: not known yet.
    """

    inside = False
    """Whether a tile is being computed: the modules in it take it whole."""

    def __init__(self, module: nn.Module, tile: int) -> None:
        self.module, self.tile = module, tile
        self.works: bool | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = partial(type(self.module).forward, self.module)
        x = args[0] if args else None
        whole = Tiled.inside or not torch.is_grad_enabled() or self.works is False or not isinstance(x, Tensor) or x.ndim < 3
        if (
            whole
            or x.shape[:2].numel() <= self.tile
            or any(isinstance(leaf, Tensor) for leaf in tree_leaves((args[1:], kwargs)))
        ):
            return run(*args, **kwargs)
        run = partial(self._piece, run, args[1:], kwargs)
        if self.works is None:
            self.works = has_no_data(x) or works_token_by_token(self.module, run, x)
            if not self.works:
                return run(x)
        parts = (part.contiguous() for part in x.split(max(self.tile // len(x), 1), 1))
        return torch.cat([checkpoint(run, part, use_reentrant=False) for part in parts], 1)

    @staticmethod
    def _piece(run: Callable, rest: tuple[Any, ...], named: dict[str, Any], x: Tensor) -> Any:
        before, Tiled.inside = Tiled.inside, True
        try:
            return run(x, *rest, **named)
        finally:
            Tiled.inside = before


def works_token_by_token(module: nn.Module, run: Callable[[Tensor], Any], x: Tensor) -> bool:
    """Whether the first tokens of ``x`` give in two pieces what they give together, without dropout."""
    pieces = [piece.contiguous() for piece in x.detach()[:, : 2 * PROBED].split(PROBED, 1)]
    with torch.no_grad(), without_dropout(module):
        apart, together = [run(piece) for piece in pieces], run(torch.cat(pieces, 1))
    if not isinstance(together, Tensor) or together.shape[:2] != torch.cat(pieces, 1).shape[:2]:
        return False
    error = (torch.cat(apart, 1).float() - together.float()).abs().amax()
    return bool(error <= 0.01 * together.float().abs().amax())


@contextmanager
def without_dropout(model: nn.Module) -> Generator[None]:
    """Inside, the modules are in evaluation mode."""
    training = [part for part in model.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True
