"""The two-step coupling against its formula, written down once more."""

import pytest
import torch
from compared import assert_equal
from covering import paired
from torch import nn

from holotrain.reversible import ReversibleStack
from holotrain.reversible.grid import FixedPointGrid
from holotrain.reversible.two_step import TwoStep, in_pieces, packed, tapered, unpacked, weights

WIDTH = 6


@pytest.mark.parametrize("bits", range(1, 9))
def test_bits_are_packed_and_come_back(bits):
    for count in (0, 1, 7, 8, 1001):
        low = torch.randint(0, 2**bits, (count,), dtype=torch.uint8)
        kept = packed(low, bits)
        assert_equal(unpacked(kept, bits, count), low)
        assert bits * count / 8 <= kept.numel() <= bits * count / 8 + 3


def test_more_bits_at_both_ends():
    assert tapered(2, 13) == [6, 5, 4, 3, 2, 2, 2, 2, 3, 4, 5, 6]
    assert tapered(1, 14) == [6, 5, 4, 3, 2, 1, 1, 1, 2, 3, 4, 5, 6]
    assert tapered(4, 7) == [6, 5, 4, 4, 5, 6]
    assert tapered(7, 3) == [7, 7]
    assert tapered(2, 3) == [6, 6]
    assert tapered(2, 1) == tapered([], 1) == []
    assert tapered([1, 5], 3) == [1, 5]


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (0, "bits must be 1 to 8, not 0"),
        (9, "not 9"),
        ([2, 0], "not 0"),
        ([2], "bits lists 1 number; 3 blocks take 2"),
        *((wrong, "bits must be a number from 1 to 8") for wrong in (2.5, None, "2", True)),
    ],
)
def test_other_numbers_of_bits_are_refused(bits, words):
    with pytest.raises(ValueError, match=words):
        tapered(bits, 3)


@pytest.mark.parametrize(("bits", "dtype"), paired([1, 2, 3, 4, 8], [torch.float32, torch.float64]))
def test_the_inverse_is_exact(dtype, bits):
    grid = FixedPointGrid(12).in_call(torch.zeros((), dtype=dtype))
    source = grid.nearest(torch.randn(64, 5, WIDTH, dtype=dtype))
    target = grid.nearest(torch.randn(5, 64, WIDTH, dtype=dtype)).transpose(0, 1)  # a stream may have any layout
    update = torch.randn(64, 5, WIDTH, dtype=dtype)
    sign = (torch.randint(0, 2, (64, 1, 1)) * 2 - 1).to(dtype)
    coupling = TwoStep(grid, source, [(each, each._version) for each in (target, source)], sign, (1.3, 0.7), bits, rebuilt=True)
    coupled = coupling.couple(target, source, update)
    rebuilt = coupling.undo(coupled, source, update)
    assert_equal(rebuilt, target)
    assert rebuilt.stride() == target.stride()


@pytest.mark.parametrize("shape", [(1, 40, WIDTH), (40, 3, WIDTH), (2, 7, WIDTH), (1, 1, 40 * WIDTH), (1, 1, 3, 5, 7, 4)])
@pytest.mark.parametrize("bits", [1, 3, 4, 6])
def test_pieces_compute_what_the_whole_does(shape, bits, monkeypatch):
    grid = FixedPointGrid(12).in_call(torch.zeros(()))
    source, target, update = grid.nearest(torch.randn(shape)), grid.nearest(torch.randn(shape)), torch.randn(shape)
    sign = (torch.randint(0, 2, (len(source),) + (1,) * (len(shape) - 1)) * 2 - 1).float()

    def coupled_and_undone():
        coupling = TwoStep(
            grid, source, [(each, each._version) for each in (target, source)], sign, (1.3, 0.7), bits, rebuilt=True
        )
        coupled = coupling.couple(target, source, update)
        return coupled, coupling.undo(coupled, source, update)

    whole = coupled_and_undone()
    monkeypatch.setattr("holotrain.reversible.two_step.LEAST_PIECE", WIDTH)
    assert len(list(in_pieces(source, sign))) > 1 or max(shape) < 8
    for one, other in zip(whole, coupled_and_undone(), strict=True):
        assert_equal(one, other)
    assert_equal(whole[1], target)


def test_a_wide_stream_is_undone_in_place_only_at_its_last_use():
    grid = FixedPointGrid(12).in_call(torch.zeros((), dtype=torch.float64))
    source, target = (grid.nearest(torch.randn(4, 5, WIDTH, dtype=torch.float64)) for _ in range(2))
    update, sign = torch.randn(4, 5, WIDTH), torch.ones(4, 1, 1, dtype=torch.float64)
    graphs = [(each.float(), 0) for each in (target, source)]
    coupling = TwoStep(grid, source.float(), graphs, sign, (1.3, 0.7), 4, rebuilt=True)
    coupled = coupling.couple(target, source, update)
    kept = coupled.clone()
    assert_equal(coupling.undo(coupled, source, update), target)
    assert_equal(coupled, kept)
    undone = coupling.undo(coupled, source, update, last_use=True)
    assert_equal(undone, target)
    assert undone is coupled


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
    generator = torch.Generator().manual_seed(0)
    updates = torch.randn(len(bits) + 1, 3, dtype=torch.float64, generator=generator)
    for sign in (1, -1):
        before = now = torch.zeros(3, dtype=torch.float64)
        for m, weight, update in zip([0, *bits], weights(bits, sign), updates, strict=True):
            before, now = now, now + weight * update - sign * 2.0**-m * (now - before)
        torch.testing.assert_close(now, updates.sum(0), rtol=1e-12, atol=1e-12)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x):
        return x + self.outer(torch.tanh(self.inner(self.norm(x))))


@pytest.mark.parametrize(("backward", "bits"), paired(["autograd", "checkpoint", "reversible", "pareprop"], [1, 2, 4]))
def test_gradients_are_those_of_the_recurrence(backward, bits):
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(7)).double()
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64)
    stack = ReversibleStack(blocks, bits, backward)
    plain = [stack.own_forward(index) for index in range(7)]
    nn.Sequential(*blocks)(x)  # chooses the grid
    gradients = {}
    for way in ("by hand", "stack"):
        source = x.clone().requires_grad_()
        torch.manual_seed(1)
        y = by_hand(plain, stack.bits, source, stack.grid.step.double()) if way == "by hand" else nn.Sequential(*blocks)(source)
        gradients[way] = [y.detach(), *torch.autograd.grad(y.sin().sum(), [source, *blocks.parameters()])]
    for a, b in zip(gradients["stack"], gradients["by hand"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_in_evaluation_and_with_many_bits_the_stack_is_the_model():
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block() for _ in range(5)))
    x = torch.randn(3, 5, WIDTH)
    plain = blocks(x)
    ReversibleStack(blocks, 8)
    torch.testing.assert_close(blocks(x), plain, rtol=0, atol=0.05)
    assert not torch.equal(blocks(x), plain)
    assert_equal(blocks.eval()(x), plain)
