"""Blocks of transformers: two residual branches, attention and an MLP, which plain and reversible blocks add in their own ways.

Shapes: B batch, T tokens, C channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holotrain.models.layers.attention import Attention
from holotrain.numeric import require_at_least, require_within
from holotrain.reversible import ReversibleBlock, ReversibleSequence, checkpointed
from holotrain.reversible.backward_option import schedules_of
from holotrain.reversible.context import in_trace
from holotrain.reversible.sequence import AveragedStreams
from holotrain.schedules import PLAIN, kind_of
from holotrain.targets import show_arguments


class DropPath(nn.Module):
    """Stochastic depth (Huang et al., 2016): drops whole samples of a residual branch in training.

    Args:
        probability: of dropping; the remaining samples are scaled by 1 / (1 - probability). Nothing is dropped in eval mode.
    """

    def __init__(self, probability: float = 0.0) -> None:
        super().__init__()
        require_within(0, 1, drop_path=probability)
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.probability == 0:
            return x
        survival = 1 - self.probability
        # Not bernoulli_(kept), of which a compiler makes other code for each probability, that is for each block. The dtype is
        # given, since Lightning's 64-true changes the default in the forward and not in the backward, which draws again.
        mask = torch.rand((x.shape[0], *(1,) * (x.dim() - 1)), dtype=torch.float32, device=x.device) < survival
        return x * (mask.to(x.dtype) / survival)

    def extra_repr(self) -> str:
        return f"probability={self.probability}"


class LayerScale(nn.Module):
    """A learned factor for each channel (Touvron et al., "Going deeper with Image Transformers", 2021). (..., C) -> (..., C).

    Args:
        value: that all C factors begin with.
    """

    def __init__(self, dim: int, value: float) -> None:
        super().__init__()
        require_at_least(0, layer_scale=value)
        self.weight = nn.Parameter(torch.full((dim,), float(value)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.to(x.dtype)  # under autocast the update keeps its precision


class Branch(nn.Module):
    """A residual branch: ``update(norm(x))``, with keyword arguments for ``update``."""

    norm: nn.Module
    update: Callable[..., Tensor]

    def forward(self, x: Tensor, **context: Any) -> Tensor:
        return self.update(self.norm(x), **context)


class AttentionBranch(Branch):
    """F of a block: norm, attention, scale (none, unless a model sets it), drop-path. (B, T, C) -> (B, T, C).

    Args:
        norm: of C channels.
        attention: (B, T, C) -> (B, T, C); keyword arguments of the call are passed to it.
    """

    def __init__(self, norm: nn.Module, attention: nn.Module, drop_path: float = 0.0) -> None:
        super().__init__()
        self.norm = norm
        self.attention = attention
        self.scale: nn.Module = nn.Identity()
        self.drop_path = DropPath(drop_path)

    def update(self, x: Tensor, **context: Any) -> Tensor:
        return self.drop_path(self.scale(self.attention(x, **context)))


class MLPBranch(Branch):
    """G of a block: LayerNorm, Linear, GELU, Linear, scale, drop-path. (..., C) -> (..., C).

    Args:
        dim, hidden: C, and the width between the two layers.
        eps: of the norm.
        gelu: ``"none"`` for the exact function, ``"tanh"`` for the approximation that GPT-2 was trained with.
    """

    def __init__(
        self, dim: int, hidden: int, dropout: float = 0.0, drop_path: float = 0.0, eps: float = 1e-6, gelu: str = "none"
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, eps=eps)
        self.widen = nn.Linear(dim, hidden)
        self.narrow = nn.Linear(hidden, dim)
        self.gelu = gelu
        self.dropout = nn.Dropout(dropout)
        self.scale: nn.Module = nn.Identity()
        self.drop_path = DropPath(drop_path)

    def update(self, x: Tensor) -> Tensor:
        x = self.dropout(F.gelu(self.widen(x), approximate=self.gelu))
        return self.drop_path(self.scale(self.dropout(self.narrow(x))))


Branches = list[tuple[AttentionBranch, MLPBranch]]


def transformer_branches(
    dim: int,
    depth: int,
    heads: int,
    mlp_ratio: float = 4.0,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    drop_path: float = 0.0,
    causal: bool = False,
    eps: float = 1e-6,
    gelu: str = "none",
) -> Branches:
    """The branches of ``depth`` blocks; drop-path grows linearly from 0 at the first to ``drop_path`` at the last.

    Raises:
        ValueError: a value out of range, or ``dim`` is not a multiple of ``heads``.
    """
    require_at_least(1, dim=dim, heads=heads, depth=depth)
    require_at_least(0.01, mlp_ratio=mlp_ratio)
    require_within(0, 1, dropout=dropout, attention_dropout=attention_dropout, drop_path=drop_path)
    (rates,) = drop_path_rates(drop_path, [depth])
    return [
        (
            AttentionBranch(nn.LayerNorm(dim, eps=eps), Attention(dim, heads, dropout, attention_dropout, causal, layer), rate),
            MLPBranch(dim, int(dim * mlp_ratio), dropout, rate, eps, gelu),
        )
        for layer, rate in enumerate(rates)
    ]


def drop_path_rates(drop_path: float, depths: Sequence[int]) -> list[list[float]]:
    """The rate of each block of each stage: it grows linearly from 0 at the first block to ``drop_path`` at the last."""
    total = sum(depths)
    rates = (drop_path * block / max(total - 1, 1) for block in range(total))
    return [list(islice(rates, depth)) for depth in depths]


class ResidualBlock(nn.Module):
    """``x = x + f(x)``, then ``x = x + g(x)``; keyword arguments are passed to f and g as in a reversible block."""

    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__()
        self.f = f
        self.g = g

    def forward(self, x: Tensor, f_kwargs: dict | None = None, g_kwargs: dict | None = None) -> Tensor:
        x = x + self.f(x, **(f_kwargs or {}))
        return x + self.g(x, **(g_kwargs or {}))


class ResidualSequence(nn.Module):
    """A sequence of residual blocks.

    Args:
        blocks: the blocks, first to last.
        backward: one of :data:`~holotrain.schedules.PLAIN`, or a list with one for each block. It is a plain attribute and may
            be changed between calls.

    Raises:
        ValueError: another ``backward``, because these blocks cannot be rebuilt from their output.
    """

    def __init__(self, blocks: Iterable[nn.Module], backward: str | Sequence[str] = "autograd") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.backward = backward

    @property
    def backward(self) -> str | Sequence[str]:
        return self._backward

    @backward.setter
    def backward(self, backward: str | Sequence[str]) -> None:
        for name in [backward] if isinstance(backward, str) else backward:
            if kind_of(name) not in PLAIN:
                raise ValueError(f"a model that is not reversible takes backward {', '.join(PLAIN)}, not {name!r}")
        self.schedules = schedules_of(backward, len(self.blocks))
        self._backward = backward

    def again(self, depth: int, backward: str) -> nn.Module:
        """A sequence ``depth`` times the first block, which takes the same arguments."""
        return type(self)([self.blocks[0]] * depth, backward=[backward] * depth)

    def part(self, start: int, stop: int) -> ResidualSequence:
        """A sequence of some of the blocks, which it shares, with their schedules."""
        found = ResidualSequence(self.blocks[start:stop])
        found.schedules = self.schedules[start:stop]
        return found

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """The only stream, as a tuple; see :class:`~holotrain.reversible.sequence.AveragedStreams`."""
        return (x,)

    def join(self, streams: tuple[Tensor, ...]) -> Tensor:
        """The only stream."""
        return streams[0]

    def forward(self, x: Tensor, f_kwargs: dict | None = None, g_kwargs: dict | None = None) -> Tensor:
        for number, (block, schedule) in enumerate(zip(self.blocks, self.schedules, strict=True)):
            with in_trace("forward", number):
                if schedule.kind == "checkpointed" and torch.is_grad_enabled():
                    arguments: dict[str, Any] = {"f_kwargs": f_kwargs, "g_kwargs": g_kwargs}
                    x = checkpointed(block, x, name=str(number), backward=schedule.input, **arguments)
                else:
                    x = block(x, f_kwargs, g_kwargs)
        return x


class ConcatenatedStreams(AveragedStreams):
    """Reversible blocks of one stream, both of whose streams are the output, one after the other: (..., C) -> (..., 2C)."""

    def join(self, streams: tuple[Tensor, ...]) -> Tensor:
        return torch.cat(streams, dim=-1)


class TwoStreamFusion(nn.Module):
    """Concatenates the two streams, normalises, and averages over tokens. 2 x (B, ..., C) -> (B, 2C)."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2 * dim, eps=eps)

    def forward(self, y1: Tensor, y2: Tensor) -> Tensor:
        return self.norm(torch.cat((y1, y2), dim=-1)).flatten(1, -2).mean(dim=1)


class LearnedFusion(nn.Module):
    """Concatenates the two streams and projects them linearly. 2 x (..., C) -> (..., C)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.project = nn.Linear(2 * dim, dim)

    @torch.no_grad()
    def become_the_average(self) -> None:
        half = torch.eye(self.project.out_features) / 2
        self.project.weight.copy_(torch.cat((half, half), dim=1))
        nn.init.zeros_(self.project.bias)

    def forward(self, y1: Tensor, y2: Tensor) -> Tensor:
        return self.project(torch.cat((y1, y2), dim=-1))


class MLPFusion(nn.Module):
    """Concatenates the two streams; then Linear(2C, 2C), GELU, Linear(2C, C). 2 x (..., C) -> (..., C).

    It is ``concat_linear_2`` of the authors of PaReprop, and begins with random weights, not as the average.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * dim, 2 * dim)
        self.project = nn.Linear(2 * dim, dim)

    def forward(self, y1: Tensor, y2: Tensor) -> Tensor:
        return self.project(F.gelu(self.mix(torch.cat((y1, y2), dim=-1))))


class Reversible:
    """Base class of reversible models, in front of the plain model. Then :func:`make_sequences` makes reversible blocks.

    Args:
        backward: how the backward pass gets the activations of a block, see
            :class:`~holotrain.reversible.ReversibleSequence`; a list: of each block
        store: blocks that store their activations: a number (the last n blocks) or a list of indices
        exact: recompute activations bit for bit on a fixed-point grid; true: choose its step from the first batch; k: step 2^-k
        keep: results to store instead of recomputing: attention, matmul, or operator names such as aten.mm.default
        tile: tokens at a time that branches take which work token by token, as MLPs do; null: all tokens
        arguments: those of the plain model
    """

    def __init__(
        self,
        *,
        backward: str | Sequence[str] = "reversible",
        store: int | Collection[int] = 0,
        exact: bool | int = False,
        keep: str | Collection[str] = (),
        tile: int | None = None,
        **arguments: Any,
    ) -> None:
        # Options of the sequences of blocks.
        self._engine: dict[str, Any] = {"store": store, "exact": exact, "keep": keep, "tile": tile}
        super().__init__(backward=backward, **arguments)  # ty: ignore[unknown-argument]: the plain model's

    def __init_subclass__(cls, **others: Any) -> None:
        """Has ``help(RevViT)`` show what ViT and this class say of their arguments, which are written once."""
        super().__init_subclass__(**others)
        cls.__signature__ = None  # not that of a base class
        show_arguments(cls, last=Reversible)


class Divisible(ABC):
    """Base class of models that a pipeline can divide between blocks (:mod:`holotrain.parallel.stages`).

    ``leave(run(part(0, depth), enter(x), x))`` is the model.

    Streams are what one block passes to the next: two tensors in a reversible model, otherwise one.
    """

    blocks: Any

    leave: Callable[..., Tensor]
    """The model's output, from the streams that the last block returns and the arguments of the model after the first."""

    @property
    def depth(self) -> int:
        """The number of blocks."""
        return len(self.blocks.blocks)

    def require_divisible(self) -> None:
        """
        Raises:
            ValueError: the blocks depend on each other beside their streams.
        """
        if getattr(self.blocks, "grid", None) is not None:
            raise ValueError("exact streams have one grid for all blocks; use backward.exact=false")

    @abstractmethod
    def outside(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """The modules that :meth:`enter` and :meth:`leave` use."""

    @abstractmethod
    def enter(self, batch: Tensor, /) -> tuple[Tensor, ...]:
        """The streams that the first block reads."""

    @abstractmethod
    def stream_shape(self, batch: Tensor, block: int, /) -> tuple[int, ...]:
        """The shape of each stream that a block reads."""

    def part(self, start: int, stop: int) -> nn.Module:
        """Some of the blocks, which are shared, for :meth:`run`."""
        return self.blocks.part(start, stop)

    def context_of(self, batch: Tensor, /) -> dict[str, Any]:
        """The keyword arguments of attention."""
        return {}

    def run(self, part: nn.Module, streams: tuple[Tensor, ...], batch: Tensor, /, *others: Tensor | None) -> tuple[Tensor, ...]:
        """The streams that a part of the blocks returns.

        Args:
            others: the arguments of the model after the first; there may be more.
        """
        return as_streams(part(*streams, self.context_of(batch)))

    @property
    def streams(self) -> int:
        """The number of streams between blocks."""
        return 2 if isinstance(self, Reversible) else 1


def as_streams(output: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The streams that a sequence of blocks returns, as a tuple also where there is one."""
    return output if isinstance(output, tuple) else (output,)


def make_sequences(
    model: nn.Module,
    stages: Sequence[Branches],
    backward: str | Sequence[str],
    streams: type[ReversibleSequence] = ReversibleSequence,
    exchange: bool = False,
) -> list[Any]:
    """The sequences of blocks of a model, one for each stage: reversible if the model is :class:`Reversible`, else residual.

    Args:
        streams: the sequence in a reversible model, whose ``store`` counts over all stages.
        exchange: of a reversible model: swap the streams after every block, so that attention reads what attention wrote.
            Without this, a model for text needs far more steps than its plain twin.
    """
    if not isinstance(model, Reversible):
        return [ResidualSequence((ResidualBlock(f, g) for f, g in branches), backward) for branches in stages]
    store = model._engine["store"]
    stored: list[Any] = [store] if len(stages) == 1 else stored_by_stage(store, [len(branches) for branches in stages])
    return [
        streams([ReversibleBlock(f, g, exchange) for f, g in branches], backward, **model._engine | {"store": blocks})
        for branches, blocks in zip(stages, stored, strict=True)
    ]


def stored_by_stage(store: int | Collection[int], depths: Sequence[int]) -> list[list[int]]:
    """The blocks of each stage that store their activations, by their indices within the stage.

    Args:
        store: how many of the model's last blocks, or their indices, counted from 0 over all stages.
        depths: blocks of each stage.

    Raises:
        ValueError: ``store`` names a block that does not exist.
    """
    schedules = iter(schedules_of("checkpoint", sum(depths), store))
    return [[i for i, each in enumerate(islice(schedules, depth)) if each.kind == "stored"] for depth in depths]
