"""The fixed-point grid: bit-equal inverses, straight-through gradients, overflow, and its place in the state_dict."""

import copy
import warnings

import pytest
import torch
from compared import assert_close, assert_equal
from torch import nn

from holotrain.reversible import ReversibleBlock, ReversibleSequence
from holotrain.reversible.tape import InputCheck

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
    """In training itself, 96 blocks under bf16: all entries of both streams, not the sample that a monitor keeps."""
    seen = []
    monkeypatch.setattr(InputCheck, "remember", lambda self, *xs: seen.append([x.clone() for x in xs]))
    monkeypatch.setattr(InputCheck, "compare", lambda self, *xs: seen.append([x.clone() for x in xs]))
    net = sequence(96, exact, backward)
    net.input_checks = []
    with torch.autocast("cpu", torch.bfloat16):
        y1, y2 = net(*streams())
    (y1 * y2).mean().backward()
    true, rebuilt = seen
    assert all(torch.equal(a, b) for a, b in zip(true, rebuilt, strict=True)) == exact


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


def test_the_grid_is_chosen_once_from_the_first_batch_and_travels_in_the_state():
    net = sequence(4)
    state = torch.get_rng_state()
    x1, x2 = streams()
    y1, _ = net(100 * x1, 100 * x2)
    assert_equal(torch.get_rng_state(), state)
    step = net.grid.step.item()
    assert y1.abs().max() < step * 2**24 / 8 and step > sequence_step_for_small_streams()
    net(x1, x2)
    assert net.grid.step.item() == step
    twin = sequence(4)
    twin.load_state_dict(net.state_dict())
    twin(x1, x2)
    assert twin.grid.step.item() == step
    assert copy.deepcopy(net).grid.step.item() == step


def sequence_step_for_small_streams() -> float:
    net = sequence(4)
    net(*streams())
    return net.grid.step.item()


def test_states_pass_between_exact_and_not():
    exact, plain = sequence(3), sequence(3, exact=False)
    plain.load_state_dict(exact.state_dict())
    exact.load_state_dict(plain.state_dict())
    assert not exact.grid.known


def test_outgrowing_the_grid_is_reported_with_the_remedy():
    net = sequence(3, exact=20)  # holds magnitudes below 16
    with pytest.warns(UserWarning, match=r"beyond 16, .* use exact=1\d"):
        net(*(30 * stream for stream in streams()))
    fitting = sequence(3, exact=16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitting(*(30 * stream for stream in streams()))


@pytest.mark.parametrize("backward", ["autograd", "reversible"])
def test_streams_that_grow_within_the_blocks_are_reported_too(backward):
    net = sequence(3, exact=20, backward=backward, gain=100.0)
    with pytest.warns(UserWarning, match=r"beyond 16, "):
        net(*streams())


@pytest.mark.parametrize("grown", [0, 1])
def test_the_drift_is_relative_to_the_stream_and_that_of_the_worse_one(grown):
    true = [stream * scale for stream, scale in zip(streams(), (50.0, 0.02), strict=True)]
    check = InputCheck()
    check.remember(*true)
    check.compare(*(stream * (1.001 if number == grown else 1.0) for number, stream in enumerate(true)))
    assert check.drift.item() == pytest.approx(1e-3, rel=1e-3)


def test_streams_too_coarse_for_a_grid_are_refused():
    with pytest.raises(ValueError, match="exact needs streams of fp32 or fp64"):
        sequence(2).bfloat16()(*streams(torch.bfloat16))


def test_on_the_meta_device_only_shapes_count():
    net = sequence(2).to("meta")
    y1, y2 = net(*(torch.empty(4, 5, WIDTH, device="meta", requires_grad=True) for _ in range(2)))
    (y1 * y2).sum().backward()
    assert not net.grid.known
