"""scripts/bench_ramps.py: networks side by side compute what make_reversible computes, and ramps are what they say."""

import argparse
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

from bench_ramps import EXACT, Bits, Networks, clip

from holotrain.reversible import make_reversible

OPTIONS = argparse.Namespace(dim=16, heads=2, context=8, batch=3)


class OneBlock(nn.Module):
    """A block of one of the networks."""

    def __init__(self, net, which, index):
        super().__init__()
        self.parts = [[weight[which : which + 1, index] for weight in part] for part in net.blocks]
        self.update = net.update

    def forward(self, x):
        return x + self.update(x.flatten(0, 1)[None], torch.Size((1, *x.shape[:2])), *self.parts).view(x.shape)


class OneNet(nn.Module):
    """One of the networks, as make_reversible takes it."""

    def __init__(self, net, which, depth):
        super().__init__()
        self.net, self.which = net.copies([which]), which
        self.blocks = nn.ModuleList(OneBlock(net, which, index) for index in range(depth))

    def forward(self, tokens):
        net, x = self.net, self.net.embed[0][tokens] + self.net.positions[0]
        for block in self.blocks:
            x = block(x)
        mean = nn.functional.layer_norm(x, x.shape[-1:]) * net.norm[0][0] + net.norm[1][0]
        return mean @ net.head[0][0] + net.head[1][0]


def networks(depth, count):
    torch.manual_seed(1)
    net = Networks(OPTIONS, depth, count)
    for parameter in net.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return net


def test_networks_side_by_side_compute_what_make_reversible_computes():
    bits = [[3, 1, 2, 4], [EXACT] * 4, [1, 1, 1, 1]]
    net, tokens = networks(5, 3), torch.randint(256, (3, 8))
    torch.manual_seed(7)  # from which make_reversible draws the signs
    sign = torch.randint(0, 2, (3, 1, 1)).flatten() * 2.0 - 1
    assert sign.unique().numel() == 2
    side_by_side = net(tokens.expand(3, -1, -1), Bits(bits, 8, "cpu").draw(sign.expand(3, -1)))
    for which, found in enumerate(side_by_side):
        one = OneNet(net, which, 5)
        plain = one(tokens).flatten(0, 1)
        if bits[which][0] != EXACT:
            one = make_reversible(one, "blocks", bits=bits[which], backward="autograd").train()
            one(tokens)  # chooses the grid
        torch.manual_seed(7)
        torch.testing.assert_close(found, one(tokens).flatten(0, 1), atol=1e-3, rtol=0)
        apart = (found - plain).abs().max().item()
        assert apart < 1e-5 if bits[which][0] == EXACT else apart > 0.02


def test_the_gradient_of_each_network_is_clipped_by_itself():
    net, tokens = networks(2, 2), torch.randint(256, (2, 3, 8))
    (net(tokens).square().mean((1, 2)) * torch.tensor([1e3, 1e-6])).sum().backward()
    small = net.embed.grad[1].clone()
    clip(net, 1.0)
    norms = [sum(parameter.grad[which].square().sum() for parameter in net.parameters()).sqrt().item() for which in (0, 1)]
    assert norms[0] == pytest.approx(1, rel=1e-3) and norms[1] < 0.01
    assert torch.equal(net.embed.grad[1], small)
