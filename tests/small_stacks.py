"""Small models in float64, whose blocks make_reversible takes, and their gradients."""

import torch
from torch import nn

from holotrain.reversible import make_reversible, stacks_in

WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.outer(torch.tanh(self.inner(x)))


class Model(nn.Module):
    """A stem, blocks one after another, and a head."""

    def __init__(self, depth=6, block=Block):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(block() for _ in range(depth))
        self.double()

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)))

    def blocks(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def inputs(seed=1):
    return torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(net, steps=2, run=None):
    """Of the last of a few steps; the first chooses the grid.

    Args:
        run: returns what is differentiated; None: the model on :func:`inputs`.
    """
    for step in range(steps):
        net.zero_grad()
        torch.manual_seed(step)
        (net(inputs()) if run is None else run(net)).sin().sum().backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def reversible(net, backward="reversible", blocks=None):
    """The model, whose blocks are recomputed; nothing may be stored instead."""
    make_reversible(net, blocks, backward=backward)
    assert stacks_in(net)
    return net
