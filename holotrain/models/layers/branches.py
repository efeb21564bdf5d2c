"""The two residual branches of a transformer block: pre-norm attention and pre-norm MLP.

Plain and reversible transformers use the same branches and differ in how a block adds them.
Shapes: B batch, T tokens, C channels.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holotrain.models.layers.attention import Attention
from holotrain.ranges import require_at_least, require_within


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
        kept = 1 - self.probability
        # Not bernoulli_(kept), of which a compiler makes other code for each probability, that is for each block. The dtype is
        # given, since Lightning's 64-true changes the default in the forward and not in the backward, which draws again.
        mask = torch.rand((x.shape[0], *(1,) * (x.dim() - 1)), dtype=torch.float32, device=x.device) < kept
        return x * (mask.to(x.dtype) / kept)

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


class AttentionBranch(nn.Module):
    """F of a block: norm, attention, scale (none, unless a model sets it), drop-path. (B, T, C) -> (B, T, C).

    Args:
        norm: of C channels.
        attention: (B, T, C) -> (B, T, C); keyword arguments of the call are passed to it.
    """

    def __init__(self, norm: nn.Module, attention: nn.Module, drop_path: float = 0.0) -> None:
        super().__init__()
        self.norm = norm
        self.attention = attention
        self.scale = nn.Identity()
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, **context: Any) -> Tensor:
        return self.update(self.norm(x), **context)

    def update(self, x: Tensor, **context: Any) -> Tensor:
        """The branch without its norm, for blocks that have it elsewhere."""
        return self.drop_path(self.scale(self.attention(x, **context)))


class MLPBranch(nn.Module):
    """G of a block: LayerNorm, Linear, GELU, Linear, scale, drop-path. (..., C) -> (..., C).

    Args:
        dim, hidden: C, and the width between the two layers.
        eps: of the norm; published weights need the value they were trained with.
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
        self.scale = nn.Identity()
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        return self.update(self.norm(x))

    def update(self, x: Tensor) -> Tensor:
        """The branch without its norm, for blocks that have it elsewhere."""
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
    """The branches of ``depth`` blocks; drop-path grows linearly from 0 at the first to ``drop_path`` at the last."""
    rates = (drop_path * i / max(depth - 1, 1) for i in range(depth))
    return [
        (
            AttentionBranch(nn.LayerNorm(dim, eps=eps), Attention(dim, heads, dropout, attention_dropout, causal, layer), rate),
            MLPBranch(dim, int(dim * mlp_ratio), dropout, rate, eps, gelu),
        )
        for layer, rate in enumerate(rates)
    ]
