"""The fixed-point grid: bit-equal inverses, straight-through gradients, overflow, and its place in the state_dict."""

import copy
import math
from itertools import pairwise

import pytest
import torch
from compared import assert_close, assert_equal
from torch import nn
from torch.utils.checkpoint import checkpoint

from holotrain.reversible import ReversibleBlock, ReversibleSequence
from holotrain.reversible.checks import StreamCheck
from holotrain.reversible.grid import LEAST_HEADROOM_BITS, MOST_HEADROOM_BITS

WIDTH = 16


class Branch(nn.Module):
    def __init__(self, gain: float = 1.0):
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.gain = gain

    def forward(self, x):
        return self.gain * self.outer(nn.functional.gelu(self.inner(self.norm(x))))


def sequence(depth: int, exact=True, backward="reversible", gain: float = 1.0) -> ReversibleSequence:
    torch.manual_seed(depth)
    return ReversibleSequence([ReversibleBlock(Branch(gain), Branch(gain)) for _ in range(depth)], backward, exact=exact)


def streams(dtype=torch.float32):
    return torch.randn(2, 4, 5, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("depth", [1, 12, 96])
def test_the_rebuilt_input_is_bit_equal(depth, autocast):
    net = sequence(depth)
    entered = []
    net.blocks[0].register_forward_pre_hook(lambda module, inputs: entered.append([x.clone() for x in inputs[:2]]))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.no_grad():
        rebuilt = net.inverse(*net(*streams()))
    assert_equal(rebuilt, entered[-1])


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("backward", ["reversible", "pareprop"])
def test_the_backward_rebuilds_bit_for_bit(monkeypatch, backward, exact):
    """In training itself, 96 blocks under bf16: all entries of the first stream, not a sample or a sum."""
    true, rebuilt, remember = [], [], StreamCheck.__init__

    def noted(self, checks, stream, *others, **named):
        true.append(stream.clone())
        remember(self, checks, stream, *others, **named)

    monkeypatch.setattr(StreamCheck, "__init__", noted)
    monkeypatch.setattr(StreamCheck, "compare", lambda self, stream, other: rebuilt.append(stream.clone()))
    net = sequence(96, exact, backward)
    with torch.autocast("cpu", torch.bfloat16):
        y1, y2 = net(*streams())
    (y1 * y2).mean().backward()
    assert torch.equal(true[0], rebuilt[0]) == exact


def test_all_schedules_agree_and_the_gradient_passes_straight_through():
    grads = {}
    for backward in ("autograd", "checkpoint", "reversible", "pareprop"):
        net = sequence(5, exact=20, backward=backward).double()
        x1, x2 = (stream.requires_grad_() for stream in streams(torch.float64))
        loss = sum(y.sin().sum() for y in net(x1, x2))
        grads[backward] = torch.cat([g.flatten() for g in torch.autograd.grad(loss, [x1, x2, *net.parameters()])])
    for backward in ("checkpoint", "reversible", "pareprop"):
        assert ((grads[backward] - grads["autograd"]).abs().max() / grads["autograd"].abs().max()).item() <= 1e-10
    rounded = sequence(5, exact=40).double()
    plain = sequence(5, exact=False).double()
    pairs = [[net(*streams(torch.float64))[0].sin().sum() for net in (rounded, plain)]]
    for ours, reference in pairs:
        of_ours = torch.autograd.grad(ours, list(rounded.blocks.parameters())[:-6])
        of_plain = torch.autograd.grad(reference, list(plain.blocks.parameters())[:-6])
        assert_close(of_ours, of_plain, rtol=1e-7, atol=1e-9)


def test_the_grid_is_chosen_from_the_first_batch_and_travels_in_the_state():
    net = sequence(4)
    state = torch.get_rng_state()
    x1, x2 = streams()
    y1, _ = net(x1, x2)
    assert_equal(torch.get_rng_state(), state)
    step = net.grid.upcoming.item()
    assert y1.abs().max() < step * 2**24 / 8
    twin = sequence(4)
    twin.load_state_dict(net.state_dict())
    twin(x1 / 2, x2 / 2)
    assert twin.grid.upcoming.item() == step
    assert copy.deepcopy(net).grid.upcoming.item() == step


def room_of(net, largest):
    return math.log2(net.grid.upcoming.item() * 2**24 / largest)


def test_the_grid_follows_the_streams_up_and_down():
    net, largest = sequence(2, gain=0.0), 1.5
    steps = []
    for factor in (1, 2, 4, 8, 16, 64, 64, 1, 1e-3, 1e-3):  # from one call to the next
        largest *= factor
        net(*(torch.full((2, 3, WIDTH), largest) for _ in range(2)))
        steps.append(math.log2(net.grid.upcoming.item()))
        assert LEAST_HEADROOM_BITS <= room_of(net, largest) <= MOST_HEADROOM_BITS
    moved = [after != before for before, after in pairwise(steps)]
    assert moved == [False, False, True, True, True, True, False, True, True]


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 0.0])
def test_the_grid_does_not_follow_what_is_no_number(wrong):
    net = sequence(2, gain=0.0)
    net(*streams())
    step = net.grid.upcoming.item()
    net(*(wrong * stream for stream in streams()))
    assert net.grid.upcoming.item() == step


def test_the_grid_stays_in_evaluation_and_where_it_was_asked_for():
    net, asked = sequence(2), sequence(2, exact=12)
    net(*streams())
    step = net.grid.upcoming.item()
    with torch.no_grad():
        net(*(1e4 * stream for stream in streams()))
    asked(*(1e4 * stream for stream in streams()))
    assert net.grid.upcoming.item() == step and asked.grid.upcoming.item() == 2.0**-12


def test_the_inverse_is_on_the_grid_of_the_forward_though_the_next_has_another():
    net, entered = sequence(12), []
    net(*streams())
    net.blocks[0].register_forward_pre_hook(lambda module, inputs: entered.append([x.detach().clone() for x in inputs[:2]]))
    y1, y2 = net(*(20 * stream for stream in streams()))
    assert net.grid.upcoming.item() > net.grid.step.item()
    with torch.no_grad():
        assert_equal(net.inverse(y1.detach(), y2.detach()), entered[0])


def test_a_process_of_ddp_with_larger_streams_keeps_its_coarser_grid():
    """DDP gives the buffers of the first process to all before each forward."""
    net = sequence(2, gain=0.0)
    net(*streams())
    of_first = net.grid.step.clone()
    net(*(1e4 * stream for stream in streams()))
    own = net.grid.upcoming.item()
    net.grid.step.copy_(of_first)
    assert net.grid.in_call(streams()).step.item() == own > of_first.item()


def test_a_state_holds_the_grid_of_the_next_forward():
    net, twin = sequence(2), sequence(2)
    net(*streams())
    before = net.grid.step.item()
    net(*(1e4 * stream for stream in streams()))
    state = net.state_dict()
    assert state["grid.step"].item() == net.grid.upcoming.item() > before
    twin.load_state_dict(state)
    assert twin.grid.in_call(streams()).step.item() == net.grid.in_call(streams()).step.item()


@pytest.mark.parametrize("grown", [3.0, 10.0])
def test_an_exact_sequence_within_a_branch_of_another(grown):
    """Its grid is chosen while the outer one tries its blocks, and is the same in a recomputation, though it follows."""

    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = sequence(2)

        def forward(self, x):
            return sum(self.inner(x, x.tanh())) / 10

    found = {}
    for backward in ("autograd", "reversible"):
        torch.manual_seed(0)
        net = ReversibleSequence([ReversibleBlock(Nested(), Branch()) for _ in range(2)], backward, exact=True)
        for factor in (1.0, grown, 1.0):
            net.zero_grad()
            sum(net(*(factor * stream for stream in streams()))).square().mean().backward()
            grads = torch.cat([p.grad.flatten() for p in net.parameters()])
            assert grads.isfinite().all()
            found.setdefault(backward, []).append(grads)
    assert_equal(found["reversible"], found["autograd"])


def test_a_checkpoint_around_the_sequence_runs_again_on_the_same_grid():
    found = {}
    for checkpointed in (False, True):
        net = sequence(3, backward="autograd" if not checkpointed else "reversible")
        for factor in (1.0, 10.0):
            x1, x2 = (factor * stream for stream in streams())
            net.zero_grad()
            y1, y2 = checkpoint(net, x1, x2, use_reentrant=False) if checkpointed else net(x1, x2)
            (y1 * y2).mean().backward()
        found[checkpointed] = [p.grad for p in net.parameters()]
    assert_equal(found[True], found[False])


def test_states_pass_between_exact_and_not():
    exact, plain = sequence(3), sequence(3, exact=False)
    plain.load_state_dict(exact.state_dict())
    exact.load_state_dict(plain.state_dict())
    assert not exact.grid.known


def test_streams_too_coarse_for_a_grid_are_refused():
    with pytest.raises(ValueError, match="exact needs streams of fp32 or fp64"):
        sequence(2).bfloat16()(*streams(torch.bfloat16))


def test_on_the_meta_device_only_shapes_count():
    net = sequence(2).to("meta")
    y1, y2 = net(*(torch.empty(4, 5, WIDTH, device="meta", requires_grad=True) for _ in range(2)))
    (y1 * y2).sum().backward()
    assert not net.grid.known
