"""Ways to run a reversible sequence, and the cases in which each must match plain autograd."""

from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import cycle, islice

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from holotrain.reversible import ReversibleBlock, ReversibleSequence

WIDTH = 8
F64 = torch.float64


MIXED = ("reversible", "pareprop", "reversible+matmul", "checkpoint", "autograd")
"""Computes the blocks one after the other."""


@dataclass
class Engine:
    """A way to run the sequence that must match plain autograd."""

    backward: str | tuple[str, ...]
    store: object = 0
    keep: tuple = ()


ENGINES = {
    "checkpoint": Engine("checkpoint"),
    "reversible": Engine("reversible"),
    "pareprop": Engine("pareprop"),
    "storing the last": Engine("reversible", store=1),
    "storing every other": Engine("pareprop", store="even"),
    "keeping products": Engine("reversible", keep=("matmul",)),
    "a schedule a block": Engine(MIXED),
}


class Branch(nn.Module):
    """A branch with dropout that can add a tensor and scale by a number, both passed in the call."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, bias=None, scale=1.0, options=None, generator=None):
        hidden = self.dropout(torch.tanh(self.inner(self.norm(x))))
        if bias is not None:
            hidden = hidden + bias
        if options is not None:
            hidden = hidden * options["gains"][0]
        if generator is not None:
            hidden = hidden + torch.randn(hidden.shape, generator=generator, dtype=F64)
        return self.dropout(self.outer(hidden)) * (scale if isinstance(scale, float) else float(scale[0]))


class BatchNormBranch(Branch):
    def __init__(self, dropout):
        super().__init__(dropout)
        self.norm = nn.BatchNorm1d(3)


class SpectralNormBranch(Branch):
    """The weight depends on a buffer that every forward changes."""

    def __init__(self, dropout):
        super().__init__(dropout)
        self.inner = torch.nn.utils.parametrizations.spectral_norm(self.inner)


class InplaceBranch(Branch):
    def forward(self, x):
        return self.outer(nn.functional.relu(self.inner(x).mul_(2), inplace=True))


class CheckpointedBranch(Branch):
    """A branch with its own activation checkpointing."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class NestedBranch(nn.Module):
    """A reversible sequence within a branch of another."""

    def __init__(self, dropout):
        super().__init__()
        self.inner = ReversibleSequence([ReversibleBlock(Branch(dropout), Branch(dropout)) for _ in range(2)], "pareprop")

    def forward(self, x):
        return sum(self.inner(x, x.tanh()))


class AttentionBranch(nn.Module):
    """Attention with dropout on the weights and on the output."""

    def __init__(self, dropout):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.weights, self.outputs = dropout, nn.Dropout(dropout)

    def forward(self, x):
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        dropped = self.weights if self.training else 0.0
        return self.outputs(nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropped).squeeze(1))


def sequence(depth: int, dropout: float = 0.0, branch=Branch, engine: Engine | None = None) -> ReversibleSequence:
    torch.manual_seed(depth)
    net = ReversibleSequence([ReversibleBlock(branch(dropout), branch(dropout)) for _ in range(depth)], "autograd").double()
    if engine is not None:
        each = isinstance(engine.backward, tuple)
        net.backward = [*islice(cycle(engine.backward), depth)] if each else engine.backward
        net.keep = engine.keep
        net.store = range(0, depth, 2) if engine.store == "even" else min(engine.store, depth)
    return net


def relative_error(result, reference) -> float:
    """The largest over all tensors of maximum difference / maximum magnitude; infinite if only one side has a gradient."""
    assert len(result) == len(reference)
    if any((a is None) != (b is None) for a, b in zip(result, reference, strict=True)):
        return float("inf")
    pairs = [(a, b) for a, b in zip(result, reference, strict=True) if a is not None]
    return max(((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item() for a, b in pairs)


def freeze_stem(net, stem):
    stem.requires_grad_(False)


def freeze_blocks(net, stem):
    for index in (0, 2):
        net.blocks[index].requires_grad_(False)


def train_adapters_only(net, stem):
    """A layer of one block, and a bias of another."""
    freeze_stem(net, stem)
    net.requires_grad_(False)
    net.blocks[1].f.outer.requires_grad_(True)
    net.blocks[2].g.outer.bias.requires_grad_(True)


def share_blocks(net, stem):
    net.blocks[2] = net.blocks[0]
    net.blocks[3].g = net.blocks[3].f


def tie_to_the_stem(net, stem):
    net.blocks[1].f.inner = nn.Sequential(stem, net.blocks[1].f.inner)


def hook_parameters(net, stem):
    for parameter in net.parameters():
        parameter.register_hook(lambda grad: 2 * grad)


def hook_modules(net, stem):
    """Hooks that change values in forward and backward, and a hook on a block that changes nothing."""
    net.blocks[0].f.inner.register_forward_hook(lambda module, inputs, output: output * 1.5)
    net.blocks[1].g.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))
    net.blocks[2].g.inner.register_full_backward_hook(lambda module, into, out: tuple(2 * grad for grad in into))
    net.blocks[2].register_forward_hook(lambda module, inputs, output: None)
    net.blocks[2].register_full_backward_hook(lambda module, into, out: None)


def evaluate(net, stem):
    net.eval()


def exchange(net, stem):
    for block in net.blocks:
        block.exchange = True


def exchange_after_the_first_and_third(net, stem):
    net.blocks[0].exchange = net.blocks[2].exchange = True


@dataclass
class Case:
    depth: int = 4
    dropout: float = 0.0
    branch: type = Branch
    prepare: object = None
    f_kwargs: dict = field(default_factory=dict)
    g_kwargs: dict = field(default_factory=dict)
    calls: int = 1
    loss: object = None


def learned(*shape):
    return torch.linspace(-1, 1, shape[-1], dtype=F64).expand(shape).clone().requires_grad_()


def generator_kwargs() -> dict:
    return {"generator": torch.Generator().manual_seed(11)}


# Comments name the public engines that fail a case, as measured (58-73% error, no gradients, an exception).
CASES = {
    **{f"depth {depth}": Case(depth=depth) for depth in [*range(1, 10), 24]},  # minREV: depth 1 and every odd depth from 3
    "dropout": Case(dropout=0.3),  # memcnn: 90%
    "dropout, two forwards before one backward": Case(dropout=0.3, calls=2),  # RevTorch, xformers, Reformer: 41%
    "evaluation with gradients": Case(dropout=0.3, prepare=evaluate),
    "frozen stem": Case(prepare=freeze_stem),  # RevTorch, xformers, revlib: no gradients at all
    "frozen blocks": Case(prepare=freeze_blocks),
    "adapters only": Case(prepare=train_adapters_only),
    "shared blocks": Case(prepare=share_blocks),
    "a layer shared with the stem": Case(prepare=tie_to_the_stem),
    "tensor hooks": Case(prepare=hook_parameters),
    "module hooks": Case(prepare=hook_modules, dropout=0.1),
    "keyword tensors with gradient": Case(f_kwargs={"bias": learned(2 * WIDTH)}, g_kwargs={"bias": learned(3, 2 * WIDTH)}),
    "keyword numbers": Case(f_kwargs={"scale": 0.5}, g_kwargs={"scale": -2.0}),
    "keyword generator": Case(f_kwargs=generator_kwargs, dropout=0.1),
    "nested keyword tensors": Case(g_kwargs={"options": {"gains": [learned(2 * WIDTH), 3]}}, dropout=0.1),
    "exchanged streams": Case(prepare=exchange, dropout=0.1),
    "exchanged streams, odd depth": Case(prepare=exchange, depth=5, f_kwargs={"bias": learned(2 * WIDTH)}),
    "exchanged streams after some blocks": Case(prepare=exchange_after_the_first_and_third),
    "batch norm": Case(branch=BatchNormBranch, dropout=0.1),  # all: statistics updated twice
    "spectral norm": Case(branch=SpectralNormBranch),
    "in-place operations": Case(branch=InplaceBranch),
    "checkpointing within": Case(branch=CheckpointedBranch, dropout=0.2),
    "a sequence within": Case(branch=NestedBranch, dropout=0.2, depth=3),
    "attention": Case(branch=AttentionBranch),
    "attention with dropout": Case(branch=AttentionBranch, dropout=0.3, calls=2),
    "only the first stream in the loss": Case(loss=lambda y1, y2: y1.sin().sum()),  # the last g then has no gradient
    "only the second stream in the loss": Case(loss=lambda y1, y2: y2.sin().sum()),
}
if find_spec("numpy"):  # a machine with torch and pytest alone runs the tests marked cuda
    import numpy as np

    CASES["keyword array"] = Case(f_kwargs={"scale": np.array([0.5])})
