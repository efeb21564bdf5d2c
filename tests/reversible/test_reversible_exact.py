"""The fixed-point grid: bit-equal inverses, straight-through gradients, overflow, and its place in the state_dict."""

import copy
import math
from itertools import pairwise

import pytest
import torch
from compared import assert_equal
from torch import nn
from torch.utils.checkpoint import checkpoint

from holotrain.reversible import ReversibleBlock, ReversibleSequence
from holotrain.reversible.grid import LEAST_HEADROOM_BITS, MOST_HEADROOM_BITS

WIDTH = 16


class Branch(nn.Sequential):
    def __init__(self, gain=1.0):
        super().__init__(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.gain = gain

    def forward(self, x):
        return self.gain * super().forward(x)


def sequence(depth: int, exact=True, backward="reversible", gain: float = 1.0) -> ReversibleSequence:
    torch.manual_seed(depth)
    return ReversibleSequence([ReversibleBlock(Branch(gain), Branch(gain)) for _ in range(depth)], backward, exact=exact)


def streams(factor=1.0, dtype=torch.float32):
    return factor * torch.randn(2, 4, 5, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)


def step_of(net):
    """That of the next forward."""
    return net.grid.upcoming.item()


@pytest.mark.parametrize("exact", [False, True])
def test_the_backward_rebuilds_bit_for_bit(exact):
    """In training itself, 96 blocks under bf16: the check compares all entries of the first stream."""
    net = sequence(96, exact)
    with torch.autocast("cpu", torch.bfloat16):
        y1, y2 = net(*streams())
    (y1 * y2).mean().backward()
    assert (net.checks.errors[0].item() == 0) == exact


def test_the_grid_is_chosen_from_the_first_batch_and_travels_in_the_state():
    net, twin = sequence(4), sequence(4)
    state = torch.get_rng_state()
    y1, _ = net(*streams())
    assert_equal(torch.get_rng_state(), state)
    step = step_of(net)
    assert y1.abs().max() < step * 2**24 / 8
    twin.load_state_dict(net.state_dict())
    twin(*streams(0.5))
    assert step_of(twin) == step_of(copy.deepcopy(net)) == step
    net(*streams(1e4))
    state = net.state_dict()  # has that of the next forward
    assert state["grid.step"].item() == step_of(net) > step
    twin.load_state_dict(state)
    assert twin.grid.in_call(streams()).step.item() == net.grid.in_call(streams()).step.item()


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_grid_is_not_chosen_from_a_batch_that_says_nothing(value):
    net = ReversibleSequence([ReversibleBlock(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))], exact=True)
    x = torch.full((2, 4), value, requires_grad=True)
    if value == 0:
        sum(net(x, x)).sum().backward()
    else:
        with pytest.raises(ValueError, match="no grid can be chosen"):
            net(x, x)
    net(torch.empty(0, 4), torch.empty(0, 4))
    assert not net.grid.known
    sum(net(torch.ones(2, 4), torch.ones(2, 4))).sum().backward()
    assert net.grid.known


def test_the_grid_follows_the_streams_up_and_down():
    net, largest, steps = sequence(2, gain=0.0), 1.5, []
    for factor in (1, 2, 4, 8, 16, 64, 64, 1, 1e-3, 1e-3):  # from one call to the next
        largest *= factor
        net(*(torch.full((2, 3, WIDTH), largest) for _ in range(2)))
        steps.append(math.log2(step_of(net)))
        assert LEAST_HEADROOM_BITS <= math.log2(step_of(net) * 2**24 / largest) <= MOST_HEADROOM_BITS
    moved = [after != before for before, after in pairwise(steps)]
    assert moved == [False, False, True, True, True, True, False, True, True]


def test_the_grid_stays_in_evaluation_and_where_it_was_set():
    net, fixed = sequence(2), sequence(2, exact=12)
    net(*streams())
    step = step_of(net)
    with torch.no_grad():
        net(*streams(1e4))
    fixed(*streams(1e4))
    assert step_of(net) == step and step_of(fixed) == 2.0**-12


def test_the_inverse_is_on_the_grid_of_the_forward_though_the_next_has_another():
    net, entered = sequence(12), []
    net(*streams())
    net.blocks[0].register_forward_pre_hook(lambda module, inputs: entered.append([x.detach().clone() for x in inputs[:2]]))
    y1, y2 = net(*streams(20))
    assert step_of(net) > net.grid.step.item()
    with torch.no_grad():
        assert_equal(net.inverse(y1.detach(), y2.detach()), entered[0])


def test_a_process_of_ddp_with_larger_streams_keeps_its_coarser_grid():
    """DDP gives the buffers of the first process to all before each forward."""
    net = sequence(2, gain=0.0)
    net(*streams())
    of_first = net.grid.step.clone()
    net(*streams(1e4))
    own = step_of(net)
    net.grid.step.copy_(of_first)
    assert net.grid.in_call(streams()).step.item() == own > of_first.item()


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = sequence(2)

    def forward(self, x):
        return sum(self.inner(x, x.tanh())) / 10


@pytest.mark.parametrize(("grown", "around"), [(3.0, "a branch"), (10.0, "a branch"), (10.0, "a checkpoint")])
def test_the_grid_follows_within_a_branch_and_within_a_checkpoint(grown, around):
    """It is chosen while an outer one tries its blocks, and is the same in a recomputation, though it follows."""
    found = {}
    for backward in ("autograd", "reversible"):
        torch.manual_seed(0)
        branches = [Nested() if around == "a branch" else Branch() for _ in range(2)]
        net = ReversibleSequence([ReversibleBlock(branch, Branch()) for branch in branches], backward, exact=True)
        for factor in (1.0, grown, 1.0):
            net.zero_grad()
            x1, x2 = streams(factor)
            within = around == "a checkpoint" and backward == "reversible"
            y1, y2 = checkpoint(net, x1, x2, use_reentrant=False) if within else net(x1, x2)
            (y1 + y2).square().mean().backward()
            found.setdefault(backward, []).append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    assert all(grads.isfinite().all() for grads in found["autograd"])
    assert_equal(found["reversible"], found["autograd"])


def test_states_pass_between_exact_and_not():
    exact, plain = sequence(3), sequence(3, exact=False)
    plain.load_state_dict(exact.state_dict())
    exact.load_state_dict(plain.state_dict())
    assert not exact.grid.known


def test_streams_too_coarse_for_a_grid_are_refused():
    with pytest.raises(ValueError, match="exact needs streams of fp32 or fp64"):
        sequence(2).bfloat16()(*streams(dtype=torch.bfloat16))
