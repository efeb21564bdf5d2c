"""The order of work on two CUDA streams, checked without a GPU: stand-in streams keep vector clocks.

Every recomputation, differentiation and sum notes the stream that it runs on. Who reads what another stream wrote must have
waited for it, through events: otherwise a GPU could run the two in either order.
"""

from collections import defaultdict
from contextlib import contextmanager

import pytest
import torch
from compared import assert_equal
from torch import nn

from holotrain.reversible import ReversibleBlock, ReversibleSequence, half, lanes, recompute, trial

WIDTH = 4


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
        self.races = []
        self.log = []

    def reads(self, what, *tensors):
        for tensor in tensors:
            if tensor is None:
                continue
            stream, tick = self.written.get(tensor.data_ptr(), (self.current.name, 0))
            if self.current.clock[stream] < tick:
                self.races.append(f"{what} on {self.current.name} reads what {stream} may not have written yet")

    def writes(self, *tensors):
        stamp = self.current.work()
        for tensor in tensors:
            if tensor is not None:
                self.alive.append(tensor)
                self.written[tensor.data_ptr()] = stamp


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

    lanes._side_stream.cache_clear()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: watcher.current)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: Stream("side"))
    monkeypatch.setattr(trial.Overlap, "begin", lambda self, stream, *rest: (lanes.StreamLanes(stream.device), None))
    recomputes, differentiates, adds = half.Half.recompute, half.Rebuilt.differentiate, recompute._sum

    def watched_recompute(self, coupled, source, tensors):
        watcher.reads("a recomputation", coupled, source)
        rebuilt = recomputes(self, coupled, source, tensors)
        watcher.writes(rebuilt.target, rebuilt.update)
        watcher.log.append(("recompute", watcher.current.name))
        return rebuilt

    def watched_differentiate(self, grad):
        watcher.reads("a differentiation", grad, self.update, self.source)
        gradients = differentiates(self, grad)
        watcher.writes(gradients.source, *gradients.parameters)
        watcher.log.append(("differentiate", watcher.current.name))
        return gradients

    def watched_sum(a, b):
        watcher.reads("a sum", a, b)
        total = adds(a, b)
        watcher.writes(total)
        return total

    monkeypatch.setattr(half.Half, "recompute", watched_recompute)
    monkeypatch.setattr(half.Rebuilt, "differentiate", watched_differentiate)
    monkeypatch.setattr(recompute, "_sum", watched_sum)
    yield watcher
    lanes._side_stream.cache_clear()


def backward(depth=4):
    torch.manual_seed(0)
    net = ReversibleSequence([ReversibleBlock(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(depth)])
    net.backward = "pareprop"
    x = torch.randn(3, WIDTH, requires_grad=True)
    y1, y2 = net(x, x.tanh())
    grads = torch.autograd.grad((y1 * y2).sum(), [x, *net.parameters()])
    return grads


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_whoever_reads_has_waited_for_the_writer(watcher, depth):
    grads = backward(depth)
    watcher.reads("what follows the backward", *grads)
    assert not watcher.races


def test_each_half_is_recomputed_beside_the_gradients_of_another(watcher):
    """f's halves on the side stream, g's on the ambient one, in the order of a pipeline of half blocks."""
    backward(3)
    g, f = "ambient", "side"
    first = [("recompute", g), ("recompute", f), ("differentiate", g), ("recompute", g), ("differentiate", f)]
    then = [("recompute", f), ("differentiate", g), ("recompute", g), ("differentiate", f)]
    last = [("recompute", f), ("differentiate", g), ("differentiate", f)]
    assert watcher.log == [*first, *then, *last]


@pytest.mark.parametrize("forgotten", ["wait_stream", "wait_event"])
def test_a_forgotten_wait_would_be_found(watcher, monkeypatch, forgotten):
    monkeypatch.setattr(Stream, forgotten, lambda self, other: None)
    backward()
    assert watcher.races


def test_a_recomputation_that_finds_no_memory_is_put_off(watcher, monkeypatch):
    plain = backward()
    watched, failures = half.Half.recompute, []

    def short_of_memory(self, *arguments):
        if watcher.current.name == "side" and len(failures) < 2:
            failures.append(self)
            raise torch.OutOfMemoryError
        return watched(self, *arguments)

    monkeypatch.setattr(half.Half, "recompute", short_of_memory)
    again = backward()
    assert len(failures) == 2
    assert_equal(plain, again)
