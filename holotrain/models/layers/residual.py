"""Residual blocks that store: the plain twin of the reversible sequence."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class ResidualBlock(nn.Module):
    """``x = x + f(x)``, then ``x = x + g(x)``; keyword arguments are handed to f and g as a reversible block does."""

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
    """Residual blocks in a row.

    Args:
        blocks: the blocks, first to last.
        backward: ``"autograd"`` stores everything, ``"checkpoint"`` stores what lies between blocks.

    Raises:
        ValueError: another ``backward``: what is not reversible cannot be rebuilt from its output.
    """

    SCHEDULES = ("autograd", "checkpoint")

    def __init__(self, blocks: Iterable[ResidualBlock], backward: str = "autograd") -> None:
        super().__init__()
        if backward not in self.SCHEDULES:
            raise ValueError(f"a model that is not reversible takes backward {' or '.join(self.SCHEDULES)}, not {backward!r}")
        self.blocks = nn.ModuleList(blocks)
        self.backward = backward

    def forward(self, x: Tensor, f_kwargs: dict | None = None, g_kwargs: dict | None = None) -> Tensor:
        for block in self.blocks:
            if self.backward == "checkpoint" and torch.is_grad_enabled():
                x = checkpoint(block, x, f_kwargs, g_kwargs, use_reentrant=False)
            else:
                x = block(x, f_kwargs, g_kwargs)
        return x
