"""Plain residual blocks: the twin of the reversible sequence."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from holotrain.reversible.ranges import in_trace
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
        self._schedules = schedules_of(backward, len(self.blocks))
        self._backward = backward

    def forward(self, x: Tensor, f_kwargs: dict | None = None, g_kwargs: dict | None = None) -> Tensor:
        for number, (block, schedule) in enumerate(zip(self.blocks, self._schedules, strict=True)):
            with in_trace("forward", number):
                if schedule.name == "checkpoint" and torch.is_grad_enabled():
                    x = checkpoint(block, x, f_kwargs, g_kwargs, use_reentrant=False, **_named(number))
                else:
                    x = block(x, f_kwargs, g_kwargs)
        return x


def _named(number: int) -> dict:
    """Names the recomputation in a trace. The compiler, which recomputes by its own rules, does not support contexts."""
    if torch.compiler.is_compiling():
        return {}
    return {"context_fn": lambda: (nullcontext(), in_trace("recompute", number))}
