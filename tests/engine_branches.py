"""Branches of the engine's matrix: what a branch may do in a forward that is run again."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from holotrain.reversible import ReversibleBlock, ReversibleSequence

WIDTH = 8
F64 = torch.float64


class Branch(nn.Module):
    """A branch with dropout that takes all kinds of keyword arguments."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, bias=None, scale=1.0, options=None, generator=None, holder=None):
        hidden = self.dropout(torch.tanh(self.inner(self.norm(x))))
        if bias is not None:
            hidden = hidden + bias
        if options is not None:
            hidden = hidden * options["gains"][0]
        if generator is not None:
            hidden = hidden + torch.randn(hidden.shape, generator=generator, dtype=F64)
        if holder is not None:
            hidden = hidden * holder.weight
        return self.dropout(self.outer(hidden)) * (scale if isinstance(scale, float) else float(scale[0]))


def batch_norm(dropout):
    branch = Branch(dropout)
    branch.norm = nn.BatchNorm1d(3)
    return branch


def spectral_norm(dropout):
    """The weight depends on a buffer that every forward changes."""
    branch = Branch(dropout)
    branch.inner = torch.nn.utils.parametrizations.spectral_norm(branch.inner)
    return branch


class InplaceBranch(Branch):
    def forward(self, x, **keywords):
        return super().forward(x, **keywords) + self.outer(nn.functional.relu(self.inner(x).mul_(2), inplace=True))


class CheckpointedBranch(Branch):
    def forward(self, x, **keywords):
        return checkpoint(super().forward, x, use_reentrant=False, **keywords)


class NestedBranch(Branch):
    """A reversible sequence within a branch of another."""

    def __init__(self, dropout):
        super().__init__(dropout)
        self.nested = ReversibleSequence([ReversibleBlock(Branch(dropout), Branch(dropout)) for _ in range(2)], "pareprop")

    def forward(self, x, **keywords):
        return super().forward(x, **keywords) + sum(self.nested(x, x.tanh(), f_kwargs=keywords)) / 4


class AttentionBranch(Branch):
    """With dropout on the weights and on the output."""

    def __init__(self, dropout):
        super().__init__(dropout)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x, **keywords):
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        dropped = self.dropout.p if self.training else 0.0
        return super().forward(nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropped).squeeze(1), **keywords)


class AsksForTheMode(Branch):
    """In inference nothing of this would be needed."""

    def forward(self, x, **keywords):
        return super().forward(x, **keywords) * (2.0 if torch.is_grad_enabled() else 1.0)


class ReadsItsSavedTensorsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[1], (grad * ctx.saved_tensors[0]).sum((0, 1))


class OwnFunction(Branch):
    """Also catches any error of its own: a recomputation stops at the last saved tensor by one."""

    def forward(self, x, **keywords):
        try:
            return super().forward(ReadsItsSavedTensorsTwice.apply(x, self.outer.bias), **keywords)
        except Exception:
            return x.exp()


class LateBranch(Branch):
    """Registers a parameter and a submodule as it first runs."""

    def forward(self, x, **keywords):
        if not hasattr(self, "scale"):
            self.scale, self.act = nn.Parameter(torch.full((WIDTH,), 2.0, dtype=F64, device=x.device)), nn.Tanh()
        return self.act(super().forward(x, **keywords)) * self.scale


class ClosingBranch(Branch):
    """Reads a tensor with a graph that is none of its parameters, and writes a buffer without that autograd counts it."""

    read = staticmethod(lambda: 1.0)

    def __init__(self, dropout):
        super().__init__(dropout)
        self.register_buffer("average", torch.ones(()))

    def forward(self, x, **keywords):
        self.average.data.mul_(0.5).add_(0.1)
        return super().forward(x, **keywords) * self.read() * self.average.clone()


class DrawingBranch(Branch):
    """Draws from torch's global generator, and from one of its own."""

    def __init__(self, dropout):
        super().__init__(dropout)
        self.generator = torch.Generator()

    def drawn(self):
        return torch.rand((), generator=self.generator).item() + torch.rand(()).item()

    def forward(self, x, **keywords):
        return super().forward(x, **keywords) * self.drawn()


BRANCHES = {
    "plain": Branch,
    "batch norm": batch_norm,  # all public engines: statistics updated twice
    "spectral norm": spectral_norm,
    "in-place operations": InplaceBranch,
    "checkpointing within": CheckpointedBranch,
    "a sequence within": NestedBranch,
    "attention": AttentionBranch,
    "asks for the mode": AsksForTheMode,
    "own function": OwnFunction,
    "late parameters": LateBranch,
    "closure": ClosingBranch,
    "draws": DrawingBranch,
}
REPEATABLE = Branch, InplaceBranch, CheckpointedBranch, NestedBranch, AttentionBranch, AsksForTheMode, LateBranch
"""What torch.utils.checkpoint may run again: the others change a state, or read saved tensors twice."""
