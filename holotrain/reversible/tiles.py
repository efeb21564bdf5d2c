"""Tiles of tokens: what works token by token is taken some hundred tokens at a time, so that its memory does not grow with T.

An MLP's tile is recomputed in the backward, by itself. The head of a language model makes its loss and gradients tile by tile in
the forward, so its logits are never whole. Loss and gradients are those without tiles, up to the order of sums. (Tiled MLPs:
ALST, arXiv 2506.13996. Gradients of a head in the forward: Liger, arXiv 2410.10989.)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from holotrain.reversible.make_reversible import is_list_of_blocks, outermost
from holotrain.reversible.replay import has_no_data
from holotrain.reversible.tokenwise import PROBED, may_be_tokenwise, same_in_pieces

IGNORED = -100
"""The label of a token to ignore."""

MOST_LOGITS = {"cuda": 2**27, "cpu": 2**24}
"""Numbers in the logits of a tile, at most."""

def tile_modules(model: nn.Module, tile: int = 512) -> list[str]:
    """Takes the MLPs of a model, and whatever else works token by token, a tile at a time in training, in place.

    They are found by their structure: at least two linear layers, and else norms, activations and dropout. At the first call
    each is tried on two short pieces, together and one by one; where the results differ, as for attention, it is left alone.

    Args:
        tile: tokens of a tile.

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
        if whole or x.shape[1] <= self.tile or any(isinstance(leaf, Tensor) for leaf in tree_leaves((args[1:], kwargs))):
            return run(*args, **kwargs)
        run = partial(self._piece, run, args[1:], kwargs)
        if self.works is None:
            self.works = same_in_pieces(self.module, run, x)
            if not self.works:
                return run(x)
        parts = (part.contiguous() for part in x.split(self.tile, 1))
        return torch.cat([checkpoint(run, part, use_reentrant=False) for part in parts], 1)

    @staticmethod
    def _piece(run: Callable, rest: tuple[Any, ...], named: dict[str, Any], x: Tensor) -> Any:
        before, Tiled.inside = Tiled.inside, True
        try:
            return run(x, *rest, **named)
        finally:
            Tiled.inside = before


def tile_loss(model: nn.Module, logits: int | None = None) -> nn.Module:
    """Makes the loss of a language model of transformers tile by tile, in place: ``model(input_ids, labels=labels).loss``.

    All that follows the hidden states is the model's own: head, scaling, soft-capping, shift of the labels, and loss. It is called for
    each tile with the states and labels of its tokens, and its gradients are made at once. In training with labels ``logits`` is
    None. At the first call it is tried on a short piece; where the loss is no mean over tokens, it is taken whole, with a warning.

    Args:
        model: the model, or one that holds it, as those of peft do.
        logits: numbers in the logits of a tile, at most; None: by the device.

    Returns:
        the language model.

    Raises:
        ValueError: there is no such model, or its loss is in tiles already.
    """
    found = next(filter(_has_a_head, model.modules()), None)
    if found is None:
        raise ValueError(f"{type(model).__name__} is no language model of transformers, with a head of its own and a base before it")
    if isinstance(vars(found).get("forward"), TiledLoss):
        raise ValueError("the loss of this model is in tiles already")
    found.forward = TiledLoss(found, logits)
    return found


def _has_a_head(module: nn.Module) -> bool:
    base = getattr(module, getattr(module, "base_model_prefix", None) or "-", None)
    return isinstance(base, nn.Module) and base is not module and getattr(module, "get_output_embeddings", lambda: None)() is not None


class TiledLoss:
    """The forward of a language model, which makes its loss tile by tile where labels are given and gradients computed.

    Attributes:
        shift: 1 where a label belongs to the token before its place, as in causal models; 0 where to its own; None: not known yet.
        whole: why the loss cannot be made in tiles.
    """

    def __init__(self, model: nn.Module, most: int | None) -> None:
        self.model, self.most, self.before = model, most, vars(model).get("forward")
        self.shift: int | None = None
        self.whole: str | None = None

    def __call__(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        run = partial(self.before or partial(type(self.model).forward, self.model), *args, **kwargs)
        if labels is None or labels.ndim != 2 or not torch.is_grad_enabled() or self.whole or "shift_labels" in kwargs:
            return run(labels=labels)
        mean = kwargs.get("num_items_in_batch") is None
        with _States(self.model.get_submodule(self.model.base_model_prefix), labels.shape[1]) as states:
            if self.shift is None:
                self._try(run, states, labels, mean)
            if self.whole:
                return states.of(run, slice(None), labels)
            rows = len(labels) * self.model.get_output_embeddings().weight.shape[0]
            tile = max((self.most or MOST_LOGITS.get(labels.device.type, 2**27)) // rows, 1)
            return self._made(run, states, labels, tile, mean)

    def _try(self, run: Callable, states: _States, labels: Tensor, mean: bool) -> None:
        """Finds out where labels belong, and whether the loss of a piece is that of its tiles."""
        piece = slice(0, min(2 * PROBED, labels.shape[1]))
        short = labels[:, piece].clamp(min=0)
        one = torch.full_like(short, IGNORED)
        one[:, 2:3] = short[:, 2:3]
        with _without_dropout(self.model), states.all_as_leaves():
            (reached,) = torch.autograd.grad(states.of(run, piece, one).loss, states.first)
            if has_no_data(reached):
                self.shift = int("CausalLM" in type(self.model).__name__ or "LMHead" in type(self.model).__name__)
                return
            places = reached.flatten(2).any(-1).any(0).nonzero().flatten().tolist()
            if places in ([1], [2]):
                self.shift = 2 - places[0]
                whole, tiles = states.of(run, piece, short).loss, self._made(run, states, short, 3, mean).loss
            if self.shift is None or not torch.allclose(whole, tiles, rtol=1e-2):
                self.whole = "it is no mean over tokens"
                warnings.warn(f"the loss of {type(self.model).__name__} is taken whole: {self.whole}", stacklevel=5)

    def _made(self, run: Callable, states: _States, labels: Tensor, tile: int, mean: bool) -> Any:
        """What the model returns, with a loss whose gradients are made."""
        assert self.shift is not None
        total, gradients = (labels[:, self.shift :] != IGNORED).sum(), _Gradients(self.model)
        for start in range(0, labels.shape[1] - self.shift, tile):
            piece = slice(start, min(start + tile + self.shift, labels.shape[1]))
            own = labels[:, piece].clone()
            own[:, : self.shift] = IGNORED  # of the tile before
            count = (own != IGNORED).sum()
            own[0, -1] = torch.where(count == 0, 0, own[0, -1])  # the mean over no token is NaN
            made = states.of(run, piece, own)
            gradients.add(made.loss * (count / total) if mean else made.loss * (count > 0), states, piece)
        made["loss"], made["logits"] = gradients.loss_of(states), None
        return made


@contextmanager
def _without_dropout(model: nn.Module) -> Generator[None]:
    training = [part for part in model.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


class _States:
    """The base of a model in a context in which it is run once. Each call gives what it returned, cut to a piece of the tokens.

    Attributes:
        given: what it returned, flat.
        leaves: the pieces of the last call that need a gradient, by their place in ``given``.
    """

    def __init__(self, base: nn.Module, tokens: int) -> None:
        self.base, self.tokens = base, tokens
        self.given: list[Any] | None = None
        self._all = False

    def __enter__(self) -> _States:
        self._before = vars(self.base).get("forward")
        self._own, self.base.forward = self.base.forward, self._forward
        return self

    def __exit__(self, *raised: object) -> None:
        del self.base.forward
        if self._before is not None:
            self.base.forward = self._before

    @contextmanager
    def all_as_leaves(self) -> Generator[None]:
        """Gradients are wanted also where the base is frozen."""
        self._all = True
        try:
            yield
        finally:
            self._all = False

    @property
    def first(self) -> Tensor:
        return next(iter(self.leaves.values()))

    def of(self, run: Callable, piece: slice, labels: Tensor) -> Any:
        """What the model returns for a piece of the tokens."""
        self._piece = piece
        return run(labels=labels)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.given is None:
            self.given, self._structure = tree_flatten(self._own(*args, **kwargs))
        pieces, self.leaves = list(self.given), {}
        for place, value in enumerate(self.given):
            if isinstance(value, Tensor):
                piece = value[:, self._piece] if self.is_of_tokens(value) else value
                if value.requires_grad or self._all and value.is_floating_point():
                    piece = self.leaves[place] = piece.detach().requires_grad_()
                pieces[place] = piece
        return tree_unflatten(pieces, self._structure)

    def is_of_tokens(self, value: Tensor) -> bool:
        return value.ndim > 1 and value.shape[1] == self.tokens


class _Gradients:
    """The sums of a loss and of its gradients over tiles: for what the base has given, and for the parameters behind it."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._sums: list[Tensor] | None = None
        self._states: dict[int, Tensor] = {}
        self._loss: Tensor | None = None

    def add(self, loss: Tensor, states: _States, piece: slice) -> None:
        found = torch.autograd.grad(loss, [*states.leaves.values(), *self._parameters], allow_unused=True)
        for (place, leaf), gradient in zip(states.leaves.items(), found, strict=False):
            value = states.given[place]
            total = self._states.setdefault(place, torch.zeros_like(value))
            if gradient is not None:
                (total[:, piece] if states.is_of_tokens(value) else total).add_(gradient)
        of_parameters = found[len(states.leaves) :]
        if self._sums is None:
            reached = [place for place, gradient in enumerate(of_parameters) if gradient is not None]
            self._parameters = [self._parameters[place] for place in reached]
            self._sums = [of_parameters[place] for place in reached]
        else:
            for total, gradient in zip(self._sums, of_parameters, strict=True):
                total.add_(gradient)
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()

    def loss_of(self, states: _States) -> Tensor:
        """The loss, with these gradients."""
        values = [states.given[place] for place in self._states]
        return _Made.apply(self._loss, [*self._states.values(), *self._sums], *values, *self._parameters)


class _Made(torch.autograd.Function):
    """A loss whose gradients are known."""

    @staticmethod
    def forward(ctx, loss: Tensor, gradients: list[Tensor], *inputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # ty: ignore[invalid-method-override]
        if ctx.gradients is None:
            raise RuntimeError("the gradients of a loss in tiles are given once; a second backward needs a second forward")
        gradients, ctx.gradients = ctx.gradients, None
        return None, None, *(each.mul_(gradient) for each in gradients)
