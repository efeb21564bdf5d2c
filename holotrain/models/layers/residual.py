"""Plain residual blocks: the twin of the reversible sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from holotrain.reversible import checkpointed
from holotrain.reversible.replay import in_trace
from holotrain.reversible.schedules import schedules_of


class ResidualBlock(nn.Module):
    """``x = x + f(x)``, then ``x = x + g(x)``; keyword arguments are passed to f and g as in a reversible block."""

    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__()
        self.f = f
        self.g = g

    def forward(self, x: Tensor, f_kwargs: dict | None = None, g_kwargs: dict | None = None) -> Tensor:
        x = x + self.f(x, **(f_kwargs or {}))
        return x + self.g(x, **(g_kwargs or {}))


class PostNormBlock(ResidualBlock):
    """``x = f.norm(x + f.update(x))``, then ``x = g.norm(x + g.update(x))``: the same branches, normalised after the sum."""

    def forward(self, x: Tensor, f_kwargs: dict | None = None, g_kwargs: dict | None = None) -> Tensor:
        x = self.f.norm(x + self.f.update(x, **(f_kwargs or {})))
        return self.g.norm(x + self.g.update(x, **(g_kwargs or {})))


class ResidualSequence(nn.Module):
    """A sequence of residual blocks.

    Args:
        blocks: the blocks, first to last.
        backward: ``"autograd"`` stores all activations, ``"checkpoint"`` only those between blocks; or a list with one for each
            block. It is a plain attribute and may be changed between calls.

    Raises:
        ValueError: another ``backward``, because these blocks cannot be rebuilt from their output.
    """

    SCHEDULES = ("autograd", "checkpoint")

    def __init__(self, blocks: Iterable[ResidualBlock], backward: str | Sequence[str] = "autograd") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.backward = backward

    @property
    def backward(self) -> str | Sequence[str]:
        return self._backward

    @backward.setter
    def backward(self, backward: str | Sequence[str]) -> None:
        for name in [backward] if isinstance(backward, str) else backward:
            if name not in self.SCHEDULES:
                raise ValueError(f"a model that is not reversible takes backward {' or '.join(self.SCHEDULES)}, not {name!r}")
        self.schedules = schedules_of(backward, len(self.blocks))
        self._backward = backward

    @property
    def ends(self) -> tuple[nn.Module, nn.Module]:
        """The modules with whose calls it begins and ends."""
        return self, self

    def again(self, depth: int, backward: str) -> nn.Module:
        """A sequence ``depth`` times the first block, which takes the same arguments."""
        return type(self)([self.blocks[0]] * depth, backward=[backward] * depth)

    def part(self, start: int, stop: int) -> ResidualSequence:
        """A sequence of some of the blocks, which it shares, with their schedules."""
        found = ResidualSequence(self.blocks[start:stop])
        found.schedules = self.schedules[start:stop]
        return found

    def split(self, x: Tensor) -> tuple[Tensor]:
        """The only stream, as a tuple; see :class:`~holotrain.models.layers.streams.AveragedStreams`."""
        return (x,)

    def join(self, streams: tuple[Tensor]) -> Tensor:
        """The only stream."""
        return streams[0]

    def forward(self, x: Tensor, f_kwargs: dict | None = None, g_kwargs: dict | None = None) -> Tensor:
        for number, (block, schedule) in enumerate(zip(self.blocks, self.schedules, strict=True)):
            with in_trace("forward", number):
                if schedule.kind == "checkpointed" and torch.is_grad_enabled():
                    x = checkpointed(block, x, name=str(number), f_kwargs=f_kwargs, g_kwargs=g_kwargs)
                else:
                    x = block(x, f_kwargs, g_kwargs)
        return x
