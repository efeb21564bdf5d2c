"""The two-step coupling against its formula, written down once more."""

import pytest
import torch
from compared import assert_close, assert_equal
from covering import paired
from small_stacks import WIDTH, Block, gradients, inputs, model, reversible
from torch import nn

from holotrain.reversible.stack import ReversibleStack, stack_of
from holotrain.reversible.two_step import weights
from holotrain.schedules import OF_REVERSIBLE


@pytest.mark.parametrize("bits", range(1, 9))
def test_streams_are_rebuilt_bit_for_bit(bits):
    """Of any number of elements, which bits are packed for; also where a stream is coupled in pieces."""
    for rows, pieces in ((1, False), (7, False), (40, True), (0, False)):
        with pytest.MonkeyPatch.context() as patch:
            x = torch.randn(rows, 5, 4, dtype=torch.float64)
            found = []
            for piece in (2**20, WIDTH) if pieces else (2**20,):
                patch.setattr("holotrain.reversible.two_step.LEAST_PIECE", piece)
                net = reversible(bits=[bits] * 5)
                gradients(net)
                found.append(gradients(net, run=lambda _, net=net, x=x: net(x)))
                assert not any(error.item() for error in stack_of(net.layers[0]).checks.errors)
            assert_equal(found[0], found[-1])


class Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, step):
        return torch.round(x / step) * step

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Halving(torch.autograd.Function):
    """Rounds g x towards the multiple below |g| x, and takes the gradient of g x."""

    @staticmethod
    def forward(ctx, x, gain, step):
        ctx.gain = gain
        return gain.sign() * torch.floor(x / step * gain.abs()) * step

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.gain, None, None


def by_hand(blocks, bits, x, step):
    """The recurrence under plain autograd."""
    sign = (torch.randint(0, 2, (len(x), 1, 1)) * 2 - 1).to(x)
    share, shares = 1, [1]
    for m in reversed(bits):
        share = 1 - sign * 2.0**-m * share
        shares.insert(0, share)
    before = Rounding.apply(x, step)
    now = Rounding.apply(before + (blocks[0](before) - before) / shares[0], step)
    for block, m, share in zip(blocks[1:], bits, shares[1:], strict=True):
        g = sign * 2.0**-m
        stepped = now + (block(now) - now) / share - g * now
        before, now = now, Halving.apply(before, g, step) + Rounding.apply(stepped, step)
    return now


@pytest.mark.parametrize("bits", [[1] * 9, [2] * 9, [4, 3, 2, 1, 1, 2, 3, 4], [8, 1, 5]])
def test_the_last_stream_is_the_sum_of_the_updates(bits):
    updates = torch.randn(len(bits) + 1, 3, dtype=torch.float64)
    for sign in (1, -1):
        before = now = torch.zeros(3, dtype=torch.float64)
        for m, weight, update in zip([0, *bits], weights(bits, sign), updates, strict=True):
            before, now = now, now + weight * update - sign * 2.0**-m * (now - before)
        assert_close(now, updates.sum(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("backward", "bits"), paired(OF_REVERSIBLE, [1, 2, 4]))
def test_gradients_are_those_of_the_recurrence(backward, bits):
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block(dropout=0.0) for _ in range(7)).double()
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64)
    plain = [block.forward for block in blocks]
    stack = ReversibleStack(blocks, bits, backward)
    nn.Sequential(*blocks)(x)  # chooses the grid
    found = []
    for way in ("by hand", "stack"):
        source = x.clone().requires_grad_()
        torch.manual_seed(1)
        step = torch.tensor(stack.grid_state()["step"], dtype=torch.float64)
        y = by_hand(plain, stack.bits, source, step) if way == "by hand" else nn.Sequential(*blocks)(source)
        found.append([y.detach(), *torch.autograd.grad(y.sin().sum(), [source, *blocks.parameters()])])
    assert_close(*found, rtol=1e-11, atol=1e-12)


def test_with_many_bits_the_stack_is_nearly_the_model():
    net, plain = reversible(bits=8), model()
    for each in (net, plain):
        for part in each.modules():
            part.p = 0.0 if isinstance(part, nn.Dropout) else getattr(part, "p", None)
    found, expected = net(inputs()), plain(inputs())
    assert_close(found, expected, rtol=0, atol=0.05)
    assert not torch.equal(found, expected)
