"""Recomputing ahead on a second CUDA stream: what runs where, on a GPU on paper, and on a real one by delays.

That nobody reads, overwrites or frees what another stream may still use is checked here too, because the GPU on paper raises;
test_order_of_streams.py shows that it does, and compares the gradients with those on the host.
"""

import random
from itertools import pairwise

import pytest
import torch
from compared import assert_equal
from torch import nn

from holotrain.reversible import ReversibleBlock, ReversibleSequence, tape
from holotrain.reversible.context import recomputing

WIDTH = 8
MAIN, SIDE = "the default stream", "side stream 1"


class Gradient(torch.autograd.Function):
    """Multiplies by a weight; its backward logs where it runs."""

    @staticmethod
    def forward(ctx, x, weight, machine, name):
        ctx.save_for_backward(x, weight)
        ctx.machine, ctx.name = machine, name
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        ctx.machine.log.append((f"gradient {ctx.name}", ctx.machine.current.name))
        return grad * weight, (grad * x).sum(0), None, None


class Branch(nn.Module):
    """``before`` is called with its name and input when it is recomputed."""

    before = None

    def __init__(self, machine, name):
        super().__init__()
        self.weight, self.machine, self.name = nn.Parameter(torch.rand(WIDTH)), machine, name

    def forward(self, x):
        if recomputing():
            if Branch.before is not None:
                Branch.before(self.name, x)
            self.machine.log.append((f"recompute {self.name}", self.machine.current.name))
        return Gradient.apply(x.sin(), self.weight, self.machine, self.name)


@pytest.fixture
def machine(monkeypatch):
    from paper_gpu import paper_gpu  # needs NumPy, which the tests marked cuda do without

    with paper_gpu(monkeypatch) as machine:
        yield machine


def log_of(machine):
    return [entry for entry in machine.log if entry[0].startswith(("recompute", "gradient"))]


def ahead(machine):
    return {what.removeprefix("recompute ") for what, stream in log_of(machine) if stream == SIDE}


def net_on(machine, depth, backward="pareprop"):
    torch.manual_seed(0)
    blocks = [ReversibleBlock(Branch(machine, f"{i}.f"), Branch(machine, f"{i}.g")) for i in range(depth)]
    return ReversibleSequence(blocks, backward).to("cuda")


def rows(count):
    return torch.linspace(-1, 1, count * WIDTH).view(count, WIDTH).to("cuda").requires_grad_()


def gradients(net, x):
    y1, y2 = net(x, x.tanh())
    return torch.autograd.grad((y1 * y2).sum(), [x, *net.parameters()])


def test_each_half_is_recomputed_beside_the_gradients_of_the_half_behind_it(machine):
    """All gradients on the current stream. Half a block runs ahead as soon as the backward reaches the half behind it."""
    gradients(net_on(machine, 3), rows(3))
    halves = [f"{i}.{letter}" for i in (2, 1, 0) for letter in "gf"]
    expected = [(f"recompute {halves[0]}", MAIN)]
    for behind, half in pairwise(halves):
        expected += [(f"recompute {half}", SIDE), (f"gradient {behind}", MAIN)]
    assert log_of(machine) == [*expected, (f"gradient {halves[-1]}", MAIN)]


def test_a_schedule_a_block_says_what_runs_ahead(machine):
    """And what does not run again."""
    gradients(net_on(machine, 4, ["reversible", "pareprop", "reversible", "autograd"]), rows(3))
    assert ahead(machine) == {"1.f", "1.g"}
    again = [what for what, _ in log_of(machine) if what.startswith("recompute")]
    assert sorted(again) == [f"recompute {block}.{letter}" for block in range(3) for letter in "fg"]


def test_a_recomputation_that_finds_no_memory_is_put_off(machine, monkeypatch):
    """Once, and said once: where there was none, no later backward tries again, unless its batch is smaller."""
    failures = []

    def short_of_memory(name, x):
        if machine.current.name == SIDE and name in ("2.f", "1.g") and len(x) == 3:
            failures.append(name)
            x * 2  # it had begun
            raise torch.OutOfMemoryError

    net, x = net_on(machine, 4), rows(3)
    plain = gradients(net, x)
    monkeypatch.setattr(Branch, "before", staticmethod(short_of_memory))
    with pytest.warns(UserWarning, match="in turn from now on") as said:
        assert_equal(gradients(net, x), plain)
        machine.log.clear()
        assert_equal(gradients(net, x), plain)
    assert failures == ["2.f", "1.g"] and len(said) == 1
    assert ahead(machine) == {"3.f", "2.g", "1.f", "0.g", "0.f"}
    machine.log.clear()
    gradients(net, rows(2))
    assert "2.f" in ahead(machine) and len(failures) == 2


def test_a_branch_that_talks_to_other_processes_is_not_put_off(machine, monkeypatch):
    """They would have met its collectives in another order."""

    def short_of_memory(name, x):
        if machine.current.name == SIDE:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(tape, "is_tensor_parallel", lambda module: True)
    monkeypatch.setattr(Branch, "before", staticmethod(short_of_memory))
    with pytest.raises(torch.OutOfMemoryError):
        gradients(net_on(machine, 4), rows(3))


delays = random.Random(0)


class Delayed(torch.autograd.Function):
    """Waits at random in the forward and in the backward, on whichever stream they run."""

    @staticmethod
    def forward(ctx, x):
        torch.cuda._sleep(delays.randrange(200_000))
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        torch.cuda._sleep(delays.randrange(200_000))
        return grad.clone()


class DelayedBranch(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        return self.outer(Delayed.apply(torch.tanh(self.inner(Delayed.apply(x)))))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
class TestOnCuda:
    @pytest.mark.parametrize("current", ["default", "another"])
    def test_random_delays_on_either_stream_never_change_a_gradient(self, current):
        torch.manual_seed(0)
        net = ReversibleSequence([ReversibleBlock(DelayedBranch(), DelayedBranch()) for _ in range(3)], "autograd")
        net.double().cuda()
        x = torch.randn(2, 3, WIDTH, dtype=torch.float64).cuda()
        reference = gradients(net, x.requires_grad_())
        net.backward = "pareprop"
        stream = torch.cuda.Stream() if current == "another" else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            first = gradients(net, x)
            for _ in range(200):
                assert_equal(gradients(net, x), first)
        torch.cuda.synchronize()
        for ours, true in zip(first, reference, strict=True):
            assert ((ours - true).abs().max() / true.abs().max()).item() <= 1e-10

    def test_no_host_synchronisation_and_little_more_memory(self):
        net = ReversibleSequence([ReversibleBlock(nn.Linear(1024, 1024), nn.Linear(1024, 1024)) for _ in range(6)], "pareprop")
        net.cuda()
        x = torch.randn(4096, 1024, device="cuda")
        sum(net(x, x)).sum().backward()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(8):
                sum(net(x, x)).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_reserved() <= 1.5 * torch.cuda.max_memory_allocated()
