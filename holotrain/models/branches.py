"""The two residual branches of a transformer block: pre-norm attention and pre-norm MLP.

Plain and reversible transformers are built from these same modules; they differ in how a block adds them up.
Shapes: B batch, T tokens, C channels, H heads, D = C / H head width.
"""

from torch import Tensor, nn
from torch.nn import functional as F


class DropPath(nn.Module):
    """Stochastic depth (Huang et al., 2016): drops whole samples of a residual branch in training.

    Args:
        probability: of dropping; the samples that stay are scaled by 1 / (1 - probability). In eval nothing is dropped.
    """

    def __init__(self, probability: float = 0.0) -> None:
        super().__init__()
        if not 0 <= probability < 1:
            raise ValueError(f"drop_path must lie in [0, 1), not {probability}")
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.probability == 0:
            return x
        kept = 1 - self.probability
        mask = x.new_empty((x.shape[0], *(1,) * (x.dim() - 1))).bernoulli_(kept)
        return x * (mask / kept)

    def extra_repr(self) -> str:
        return f"probability={self.probability}"


class Attention(nn.Module):
    """Multi-head self-attention on PyTorch's scaled_dot_product_attention. (B, T, C) -> (B, T, C).

    Raises:
        ValueError: ``dim`` is no multiple of ``heads``.
    """

    def __init__(self, dim: int, heads: int, dropout: float = 0.0, attention_dropout: float = 0.0) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim must be a multiple of heads, but {dim} is none of {heads}")
        self.heads = heads
        self.attention_dropout = attention_dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.project = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        dropout = self.attention_dropout if self.training else 0.0
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=False)
        return self.dropout(self.project(x.transpose(1, 2).flatten(2)))


class AttentionBranch(nn.Module):
    """F of a block: LayerNorm, attention, drop-path. (B, T, C) -> (B, T, C)."""

    def __init__(
        self, dim: int, heads: int, dropout: float = 0.0, attention_dropout: float = 0.0, drop_path: float = 0.0
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.attention = Attention(dim, heads, dropout, attention_dropout)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop_path(self.attention(self.norm(x)))


class MLPBranch(nn.Module):
    """G of a block: LayerNorm, Linear, GELU, Linear, drop-path. (..., C) -> (..., C).

    Args:
        dim, hidden: C, and the width between the two Linear.
        eps: of the LayerNorm; published weights expect their own.
    """

    def __init__(self, dim: int, hidden: int, dropout: float = 0.0, drop_path: float = 0.0, eps: float = 1e-6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, eps=eps)
        self.widen = nn.Linear(dim, hidden)
        self.narrow = nn.Linear(hidden, dim)
        self.dropout = nn.Dropout(dropout)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(F.gelu(self.widen(self.norm(x))))
        return self.drop_path(self.dropout(self.narrow(x)))


Branches = list[tuple[AttentionBranch, MLPBranch]]


def transformer_branches(
    dim: int,
    depth: int,
    heads: int,
    mlp_ratio: float = 4.0,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    drop_path: float = 0.0,
) -> Branches:
    """The branches of ``depth`` blocks; drop-path grows linearly from 0 at the first to ``drop_path`` at the last."""
    rates = [drop_path * i / max(depth - 1, 1) for i in range(depth)]
    return [
        (
            AttentionBranch(dim, heads, dropout, attention_dropout, rate),
            MLPBranch(dim, int(dim * mlp_ratio), dropout, rate),
        )
        for rate in rates
    ]
