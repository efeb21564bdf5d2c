"""Recomputing ahead on a second CUDA stream: who waits for whom, checked without a GPU by stand-ins, and on one by delays.

The stand-in streams keep vector clocks. Every recomputation, inversion and gradient notes the stream that it runs on. Who reads
what another stream wrote must have waited for it, through events: otherwise a GPU could run the two in either order.
"""

import random
import weakref
from collections import defaultdict
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from compared import assert_equal
from torch import nn

from holotrain.reversible import ReversibleBlock, ReversibleSequence, recomputation
from holotrain.reversible.block import Additive

WIDTH = 8


class Stream:
    """Ticks with each piece of work; knows of the others' what it has waited for."""

    def __init__(self, name):
        self.name, self.cuda_stream = name, id(self)
        self.clock = defaultdict(int)

    def work(self):
        self.clock[self.name] += 1
        return self.name, self.clock[self.name]

    def record_event(self):
        return dict(self.clock)

    def wait_event(self, event):
        for name, tick in event.items():
            self.clock[name] = max(self.clock[name], tick)

    def wait_stream(self, other):
        self.wait_event(other.record_event())


class Watcher:
    def __init__(self):
        self.ambient = Stream("ambient")
        self.current = self.ambient
        self.written = {}
        self.alive = []  # no address is used twice
        self.races, self.log = [], []
        self.reading = None  # what the side stream reads while it may not have been waited for

    def reads(self, what, *tensors):
        for tensor in tensors:
            stream, tick = self.written.get(tensor.data_ptr(), (self.current.name, 0))
            if self.current.clock[stream] < tick:
                self.races.append(f"{what} on {self.current.name} reads what {stream} may not have written yet")

    def writes(self, *tensors):
        stamp = self.current.work()
        for tensor in tensors:
            self.alive.append(tensor)
            self.written[tensor.data_ptr()] = stamp


class Gradient(torch.autograd.Function):
    """Multiplies by a weight; its backward notes where it runs and what it reads."""

    @staticmethod
    def forward(ctx, x, weight, watcher, name):
        ctx.save_for_backward(x, weight)
        ctx.watcher, ctx.name = watcher, name
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        ctx.watcher.reads("a gradient", x, grad)
        ctx.watcher.log.append((f"gradient {ctx.name}", ctx.watcher.current.name))
        into = grad * weight
        ctx.watcher.writes(into)
        if ctx.watcher.reading is not None:
            assert all(stream() is not None for stream in ctx.watcher.reading), "let go of before it was waited for"
        return into, (grad * x).sum(0), None, None


class Branch(nn.Module):
    def __init__(self, watcher, name):
        super().__init__()
        self.weight, self.watcher, self.name = nn.Parameter(torch.rand(WIDTH)), watcher, name

    def forward(self, x):
        return Gradient.apply(x.sin(), self.weight, self.watcher, self.name)


@pytest.fixture
def watcher(monkeypatch):
    watcher = Watcher()

    @contextmanager
    def on(stream):
        before, watcher.current = watcher.current, stream
        try:
            yield
        finally:
            watcher.current = before

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: watcher.current)
    monkeypatch.setattr(torch.cuda, "stream", on)
    side = Stream("side")
    monkeypatch.setattr(recomputation, "_side_stream", lambda device, ambient: side)
    monkeypatch.setattr(recomputation, "side_of", lambda stream: recomputation.SideStream(stream.device))
    again, undo = recomputation.Branch.run_again, Additive.undo

    def watched_again(self, source, output=True):
        watcher.reads("a recomputation", source)
        watcher.log.append((f"recompute {self.name}", watcher.current.name))
        update, saved = again(self, source, output)
        own = {p.data_ptr() for p in self.module.parameters()}
        made = [] if update is None else [update]
        watcher.writes(*made, *(tensor for tensor in saved if tensor.data_ptr() not in own | {source.data_ptr()}))
        return update, saved

    def watched_undo(self, coupled, source, update):
        watcher.reads("an inversion", coupled, update)
        watcher.reading = [weakref.ref(coupled.untyped_storage())] if watcher.current is side else None
        target = undo(self, coupled, source, update)
        watcher.writes(target)
        return target

    monkeypatch.setattr(recomputation.Branch, "run_again", watched_again)
    monkeypatch.setattr(Additive, "undo", watched_undo)
    return watcher


def watched_net(watcher, depth=4, backward="pareprop"):
    torch.manual_seed(0)
    blocks = [ReversibleBlock(Branch(watcher, f"{i}.f"), Branch(watcher, f"{i}.g")) for i in range(depth)]
    return ReversibleSequence(blocks, backward)


def gradients(net, x):
    y1, y2 = net(x, x.tanh())
    return torch.autograd.grad((y1 * y2).sum(), [x, *net.parameters()])


def watched_backward(watcher, depth=4, backward="pareprop"):
    net = watched_net(watcher, depth, backward)
    return gradients(net, torch.rand(3, WIDTH, requires_grad=True))


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_whoever_reads_has_waited_for_the_writer(watcher, depth):
    watched_backward(watcher, depth)
    assert watcher.log and not watcher.races


def test_each_half_is_recomputed_beside_the_gradients_of_the_half_behind_it(watcher):
    """All gradients on the ambient stream. Half a block runs ahead as soon as the backward reaches the half behind it."""
    watched_backward(watcher, 3)
    halves = [f"{i}.{letter}" for i in (2, 1, 0) for letter in "gf"]
    expected = [(f"recompute {halves[0]}", "ambient")]
    for behind, half in pairwise(halves):
        expected += [(f"recompute {half}", "side"), (f"gradient {behind}", "ambient")]
    assert watcher.log == [*expected, (f"gradient {halves[-1]}", "ambient")]


def test_in_turn_nothing_leaves_the_ambient_stream(watcher):
    watched_backward(watcher, 3, "reversible")
    assert {stream for _, stream in watcher.log} == {"ambient"}


def test_a_schedule_a_block_says_what_runs_ahead(watcher):
    watched_backward(watcher, 3, ["reversible", "pareprop", "reversible"])
    ahead = {what for what, stream in watcher.log if stream == "side"}
    assert ahead == {"recompute 1.f", "recompute 1.g"} and not watcher.races


@pytest.mark.parametrize("forgotten", ["wait_stream", "wait_event"])
def test_a_forgotten_wait_would_be_found(watcher, monkeypatch, forgotten):
    monkeypatch.setattr(Stream, forgotten, lambda self, other: None)
    watched_backward(watcher)
    assert watcher.races


def test_a_recomputation_that_finds_no_memory_is_put_off(watcher, monkeypatch):
    """Once, and said once: where there was none, no later backward tries again, unless its batch is smaller."""
    watched, failures = recomputation.Branch.run_again, []

    def short_of_memory(self, source, output=True):
        if watcher.current.name == "side" and self.name in ("2.f", "1.g") and len(source) == 3:
            failures.append(self.name)
            watcher.writes(torch.empty(1))
            raise torch.OutOfMemoryError
        return watched(self, source, output)

    net, x = watched_net(watcher), torch.rand(3, WIDTH, requires_grad=True)
    plain = gradients(net, x)
    monkeypatch.setattr(recomputation.Branch, "run_again", short_of_memory)
    with pytest.warns(UserWarning, match="in turn from now on") as said:
        assert_equal(gradients(net, x), plain)
        watcher.log.clear()
        assert_equal(gradients(net, x), plain)
    assert failures == ["2.f", "1.g"] and len(said) == 1 and not watcher.races
    ahead = {what for what, stream in watcher.log if stream == "side"}
    assert ahead == {f"recompute {half}" for half in ("3.f", "2.g", "1.f", "0.g", "0.f")}
    watcher.log.clear()
    gradients(net, x[:2].detach().requires_grad_())
    assert ("recompute 2.f", "side") in watcher.log and len(failures) == 2


def test_a_branch_that_talks_to_other_processes_is_not_put_off(watcher, monkeypatch):
    """They would have met its collectives in another order."""

    watched = recomputation.Branch.run_again

    def short_of_memory(self, source, output=True):
        if watcher.current.name == "side":
            raise torch.OutOfMemoryError
        return watched(self, source, output)

    net = watched_net(watcher)
    y = net(torch.rand(3, WIDTH), torch.rand(3, WIDTH))
    monkeypatch.setattr(recomputation, "_is_shared_out", lambda module: True)
    monkeypatch.setattr(recomputation.Branch, "run_again", short_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        sum(y).sum().backward()


def test_gradients_are_the_same_ahead_and_in_turn(watcher):
    for depth in (1, 4):
        ours = watched_backward(watcher, depth)
        assert_equal(ours, watched_backward(watcher, depth, "reversible"))
        true = watched_backward(watcher, depth, "autograd")
        for one, other in zip(ours, true, strict=True):
            assert ((one - other).abs().max() / other.abs().max()).item() <= 1e-5


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
    @pytest.mark.parametrize("ambient", ["default", "another"])
    def test_random_delays_on_either_stream_never_change_a_gradient(self, ambient):
        torch.manual_seed(0)
        net = ReversibleSequence([ReversibleBlock(DelayedBranch(), DelayedBranch()) for _ in range(3)], "autograd")
        net.double().cuda()
        x = torch.randn(2, 3, WIDTH, dtype=torch.float64).cuda()

        def gradients():
            y1, y2 = net(x, x.tanh())
            return torch.autograd.grad((y1 * y2.sin()).sum(), list(net.parameters()))

        reference = gradients()
        net.backward = "pareprop"
        stream = torch.cuda.Stream() if ambient == "another" else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            first = gradients()
            for _ in range(200):
                assert_equal(gradients(), first)
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
