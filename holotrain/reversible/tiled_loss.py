"""The loss of a language model, a tile of tokens at a time: its logits, the largest tensors of a step, are never whole.

What follows the hidden states is the model's own, and is called for each tile. The gradients of a tile are made at once, in the
forward, so nothing of it stays. (Liger Kernel, arXiv 2410.10989.) Loss and gradients are those of the whole, up to the order of
sums.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten

from holotrain.reversible.reads import is_sharded
from holotrain.reversible.replay import has_no_data
from holotrain.reversible.tokenwise import PROBED, without_dropout

IGNORED = -100
"""The label of a token to ignore."""

MOST_LOGITS = {"cuda": 2**27, "cpu": 2**23}
"""Numbers in the logits of a tile, at most."""


def tile_loss(model: nn.Module, logits: int | None = None) -> nn.Module:
    """Makes the loss of a language model of transformers tile by tile, in place: ``model(input_ids, labels=labels).loss``.

    All that follows the hidden states is the model's own: head, scaling, soft-capping, shift of the labels, and loss. With
    gradients and labels ``logits`` is None. At the first call it is tried on a short piece; where the loss is no mean over
    tokens, it is taken whole, with a warning.

    Args:
        model: the model, or one that holds it, as those of peft do.
        logits: numbers in the logits of a tile, at most; None: by the device.

    Returns:
        the language model.

    Raises:
        ValueError: there is no such model.
    """
    found = language_model(model)
    if found is None:
        raise ValueError(f"{type(model).__name__} is no language model of transformers, with a base and a head")
    untile_loss(found)
    found.forward = TiledLoss(found, logits)
    return found


def untile_loss(model: nn.Module) -> None:
    """Takes back what :func:`tile_loss` did."""
    for module in model.modules():
        if isinstance(tiled := vars(module).get("forward"), TiledLoss):
            del module.forward
            if tiled.before is not None:
                module.forward = tiled.before


def language_model(model: nn.Module) -> Any:
    """The part of a model that has a base and a head for words, as transformers names them."""
    return next(filter(_has_a_head, model.modules()), None)


def _has_a_head(module: nn.Module) -> bool:
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):  # its labels are inputs too
        return False
    head = getattr(module, "get_output_embeddings", lambda: None)()
    return _base_of(module) not in (None, module) and head is not None


def _base_of(module: nn.Module) -> Any:
    """What gives the hidden states of a model: its base, or, in an OPT, the decoder in it."""
    base = getattr(module, getattr(module, "base_model_prefix", None) or "-", None)
    if isinstance(base, nn.Module) and len(children := [*base.children()]) == 1 and base is not module:
        return children[0]
    return base if isinstance(base, nn.Module) else None


def tiled_cross_entropy(model: nn.Module, targets: Tensor, **inputs: Any) -> Tensor:
    """The mean cross-entropy of ``model(**inputs).logits``; NaN if all targets are ignored.

    Args:
        model: one in which :func:`language_model` finds one.
        targets: (B, T) of words; -100 is ignored.
    """
    found = language_model(model)
    if is_sharded(type(found.get_output_embeddings())):  # it would be gathered for each tile
        return _cross_entropy(model(**inputs), targets.flatten(), "mean")
    with _Base(found, targets.shape[1]) as base, _Sums(found, base) as sums:
        for piece in _pieces(targets.shape[1], _tile(found, targets, None)):
            own = targets[:, piece].flatten()
            sums.add(_cross_entropy(base.piece(piece, partial(model, **inputs)), own, "sum"), piece)
        return sums.loss((targets != IGNORED).sum())


def _cross_entropy(result: Any, targets: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(result.logits.flatten(0, 1).float(), targets, reduction=reduction)


def _tile(model: Any, labels: Tensor, most: int | None) -> int:
    """Tokens of each row that a tile holds."""
    row = len(labels) * model.get_output_embeddings().weight.shape[0]
    return max((most or MOST_LOGITS.get(labels.device.type, 2**27)) // row, 1)


def _pieces(tokens: int, tile: int, shift: int = 0) -> Iterator[slice]:
    """The tiles, each with the ``shift`` tokens after it, whose labels are its last."""
    for start in range(0, tokens - shift, tile):
        yield slice(start, min(start + tile + shift, tokens))


class TiledLoss:
    """The forward of a language model, which makes its loss tile by tile where labels are given and gradients computed.

    Attributes:
        shift: 1 where a label belongs to the token before its place, as in causal models, 0 where to its own; None: not known.
        whole: the loss cannot be made in tiles.
    """

    def __init__(self, model: Any, most: int | None) -> None:
        self.model, self.most, self.before = model, most, vars(model).get("forward")
        self.shift: int | None = None
        self.whole = False

    @property
    def __signature__(self) -> inspect.Signature:
        """The Trainer of transformers looks at it, to find out which columns of data the model takes."""
        return inspect.signature(self._own())

    def _own(self) -> Callable:
        return self.before or MethodType(type(self.model).forward, self.model)

    def __call__(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        run = partial(self._own(), *args, **kwargs)
        if is_sharded(type(self.model.get_output_embeddings())):  # it would be gathered for each tile
            self._take_whole("is not in tiles, since its head is sharded by itself")
        if labels is None or labels.ndim != 2 or not torch.is_grad_enabled() or self.whole:
            return run(labels=labels)
        if labels.shape[1] < PROBED or "shift_labels" in kwargs or kwargs.get("return_dict") is False:
            return run(labels=labels)
        mean = kwargs.get("num_items_in_batch") is None
        with _Base(self.model, labels.shape[1]) as base:
            if self.shift is None:
                try:
                    self._try(run, base, labels, mean)
                except (IndexError, RuntimeError, TypeError, ValueError):
                    if base.given:
                        raise
                    self._take_whole("is taken whole: its base is not called")
            if self.whole:
                return base.piece(slice(None), partial(run, labels=labels))
            return self._made(run, base, labels, _tile(self.model, labels, self.most), mean)

    def _try(self, run: Callable, base: _Base, labels: Tensor, mean: bool) -> None:
        """Finds out where labels belong, and whether the loss of a piece is that of its tiles."""
        piece = slice(0, min(2 * PROBED, labels.shape[1]))
        short = labels[:, piece].clamp(min=0)
        one = torch.full_like(short, IGNORED)
        one[:, 2:3] = short[:, 2:3]
        base.piece(piece, partial(run, labels=one))  # runs the base, once, as the model is
        with without_dropout(self.model):
            (reached,) = torch.autograd.grad(base.piece(piece, partial(run, labels=one)).loss, base.first)
            if has_no_data(reached):
                self.shift = int(any(kind in type(self.model).__name__ for kind in ("CausalLM", "LMHead")))
                return
            places = reached.flatten(2).any(-1).any(0).nonzero().flatten().tolist()
            if places in ([1], [2]):
                self.shift = 2 - places[0]
                whole = base.piece(piece, partial(run, labels=short)).loss
                tiles = self._made(run, base, short, 3, mean).loss
            if self.shift is None or not torch.allclose(whole, tiles, rtol=1e-2):
                self._take_whole("is no mean over tokens, so it is taken whole")

    def _take_whole(self, why: str) -> None:
        if self.whole:
            return
        self.whole = True
        warnings.warn(f"the loss of {type(self.model).__name__} {why}", stacklevel=5)

    def _made(self, run: Callable, base: _Base, labels: Tensor, tile: int, mean: bool) -> Any:
        """What the model returns, with a loss whose gradients are made."""
        assert self.shift is not None
        with _Sums(self.model, base) as sums:
            for piece in _pieces(labels.shape[1], tile, self.shift):
                own = labels[:, piece].clone()
                own[:, : self.shift] = IGNORED  # of the tile before
                count = (own != IGNORED).sum()
                own[0, -1] = torch.where(count == 0, 0, own[0, -1])  # the mean over no token is NaN
                made = base.piece(piece, partial(run, labels=own))
                made["logits"] = None  # which the gradients do not need
                sums.add(made.loss * (count if mean else count > 0), piece)
            made["loss"] = sums.loss((labels[:, self.shift :] != IGNORED).sum() if mean else None)
        return made


class _Base:
    """The base of a model in a context in which it runs once. Each call gives what it returned, cut to a piece of the tokens.

    Attributes:
        given: what it returned, flat; empty before its run.
        leaves: the pieces of the last call, with gradients of their own, by their place in ``given``.
    """

    def __init__(self, model: nn.Module, tokens: int) -> None:
        self.module, self.tokens = _base_of(model), tokens
        self.given: list[Any] = []
        self.leaves: dict[int, Tensor] = {}

    def __enter__(self) -> Self:
        self._before = vars(self.module).get("forward")
        self._own, self.module.forward = self.module.forward, self._forward
        return self

    def __exit__(self, *raised: object) -> None:
        del self.module.forward
        if self._before is not None:
            self.module.forward = self._before

    @property
    def first(self) -> Tensor:
        return next(iter(self.leaves.values()))

    def piece(self, piece: slice, run: Callable[[], Any]) -> Any:
        """What a call of the model returns for a piece of the tokens."""
        self._piece = piece
        return run()

    def of_tokens(self, value: Tensor) -> bool:
        return value.ndim > 1 and value.shape[1] == self.tokens

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.given:
            self.given, self._structure = tree_flatten(self._own(*args, **kwargs))
        pieces, self.leaves = list(self.given), {}
        for place, value in enumerate(self.given):
            if isinstance(value, Tensor):
                piece = value[:, self._piece] if self.of_tokens(value) else value
                if value.is_floating_point():  # also where the base is frozen
                    piece = self.leaves[place] = piece.detach().requires_grad_()
                pieces[place] = piece
        return tree_unflatten(pieces, self._structure)


class _Sums:
    """The sums of a loss and of its gradients over tiles: for what the base has given, and for the parameters behind it.

    In its context a head that is one linear layer adds the gradients of its weight to their sum in place.
    """

    def __init__(self, model: Any, base: _Base) -> None:
        self._base, self._head = base, _Head.of(model.get_output_embeddings())
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._gradients: list[Tensor] = []
        self._states: dict[int, Tensor] = {}
        self._loss: Tensor | None = None

    def __enter__(self) -> Self:
        if self._head is not None:
            self._head.layer.forward = self._head
        return self

    def __exit__(self, *raised: object) -> None:
        if self._head is not None:
            del self._head.layer.forward

    def add(self, loss: Tensor, piece: slice) -> None:
        if torch.is_grad_enabled():
            self._differentiate(loss, piece)
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()

    def _differentiate(self, loss: Tensor, piece: slice) -> None:
        leaves = self._base.leaves
        with torch.autocast(loss.device.type, enabled=False):
            found = torch.autograd.grad(loss, [*leaves.values(), *self._parameters], allow_unused=True)
        for place, gradient in zip(leaves, found, strict=False):
            value = self._base.given[place]
            if value.requires_grad:
                total = self._states.setdefault(place, torch.zeros_like(value))
            if value.requires_grad and gradient is not None:
                (total[:, piece] if self._base.of_tokens(value) else total).add_(gradient)
        of_parameters = found[len(leaves) :]
        if self._loss is None:
            reached = [place for place, gradient in enumerate(of_parameters) if gradient is not None]
            self._parameters = [self._parameters[place] for place in reached]
            self._gradients = [of_parameters[place] for place in reached]
            return
        for total, gradient in zip(self._gradients, of_parameters, strict=True):
            total.add_(gradient)

    def loss(self, count: Tensor | None) -> Tensor:
        """The sum, or the mean over ``count`` tokens, with its gradients."""
        assert self._loss is not None
        inputs, gradients = [self._base.given[place] for place in self._states], [*self._states.values()]
        inputs, gradients = inputs + self._parameters, gradients + self._gradients
        if self._head is not None:
            for parameter, total in self._head.sums:
                inputs.append(parameter)
                gradients.append(total)
        one = self._loss.new_ones(())
        return _Made.apply(self._loss, one if count is None else one / count, gradients, *inputs)


class _Head:
    """The forward of a linear layer whose weight's gradient is added up in place.

    Attributes:
        sums: its parameters with their gradients so far.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        own = [parameter for parameter in layer.parameters() if parameter.requires_grad and torch.is_grad_enabled()]
        accumulated = [torch.promote_types(parameter.dtype, torch.float32) for parameter in own]
        self.sums = [(each, torch.zeros_like(each, dtype=dtype)) for each, dtype in zip(own, accumulated, strict=True)]
        self._cast: dict[torch.dtype, list[Tensor | None]] = {}

    @classmethod
    def of(cls, layer: nn.Module) -> Self | None:
        """None: it is another module, which autograd differentiates."""
        if type(layer) is not nn.Linear or "forward" in vars(layer) or type(layer.weight) is not nn.Parameter:
            return None
        return cls(layer)

    def __call__(self, x: Tensor) -> Tensor:
        device, dtype = x.device.type, x.dtype
        if torch.is_autocast_enabled(device) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
        if dtype not in self._cast:  # once for all tiles
            given = (self.layer.weight, self.layer.bias)
            self._cast[dtype] = [None if each is None else each.detach().to(dtype) for each in given]
        with torch.autocast(device, enabled=False):
            return _Linear.apply(x.to(dtype), *self._cast[dtype], [total for _, total in self.sums])


class _Linear(torch.autograd.Function):
    """A linear layer; the gradients of its parameters are added to ``sums``, one for each dimension that a parameter has."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, sums: list[Tensor]) -> Tensor:
        flat = x.flatten(0, -2)
        ctx.save_for_backward(flat, weight)
        ctx.sums = sums
        return F.linear(flat, weight, bias).unflatten(0, x.shape[:-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        flat = gradient.flatten(0, -2)
        for total in ctx.sums:
            if total.ndim == 1:
                total += flat.sum(0, dtype=total.dtype)
            elif total.dtype == flat.dtype:
                total.addmm_(flat.T, x)
            else:
                total += flat.T @ x
        return (flat @ weight).unflatten(0, gradient.shape[:-1]), None, None, None


class _Made(torch.autograd.Function):
    """``loss * scale``, whose gradients are known but for the scale. In half precision they would underflow with it."""

    @staticmethod
    def forward(ctx, loss: Tensor, scale: Tensor, gradients: list[Tensor], *inputs: Tensor) -> Tensor:
        ctx.gradients, ctx.scale, ctx.dtypes = gradients, scale, [each.dtype for each in inputs]
        return loss * scale

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the gradients of a loss in tiles are given once; a second backward needs a second forward")
        gradients, ctx.gradients = ctx.gradients, None
        scale = gradient * ctx.scale
        scaled = [each.mul_(scale).to(dtype) for each, dtype in zip(gradients, ctx.dtypes, strict=True)]
        return None, None, None, *scaled
