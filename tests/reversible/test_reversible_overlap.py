"""Overlap: delays never change a gradient, and it is used only where it was measured to pay."""

import copy
import random
import time

import pytest
import torch
from compared import assert_equal
from torch import nn

from holotrain.reversible import ReversibleBlock, ReversibleSequence, trial
from holotrain.reversible.lanes import Lanes, ThreadLanes
from holotrain.reversible.trial import MEASURED, WARM_UPS, Overlap, Trial

WIDTH = 8
delays = random.Random(0)


class _Delayed(torch.autograd.Function):
    """Waits at random in the forward and in the backward: on whichever thread or stream they run."""

    @staticmethod
    def forward(ctx, x):
        _wait(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        _wait(grad)
        return grad.clone()


def _wait(tensor):
    if tensor.is_cuda:
        torch.cuda._sleep(delays.randrange(200_000))
    else:
        time.sleep(delays.choice((0, 0, 1e-4, 4e-4)))


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        return self.outer(_Delayed.apply(torch.tanh(self.inner(_Delayed.apply(x)))))


def net_and_input(device="cpu"):
    torch.manual_seed(0)
    net = ReversibleSequence([ReversibleBlock(Branch(), Branch()) for _ in range(3)], "autograd").double().to(device)
    return net, torch.randn(2, 3, WIDTH, dtype=torch.float64).to(device)


def gradients(net, x):
    y1, y2 = net(x, x.tanh())
    return torch.autograd.grad((y1 * y2.sin()).sum(), list(net.parameters()))


@pytest.fixture
def one_thread(monkeypatch):
    monkeypatch.setattr(trial, "_cores", lambda: 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_random_delays_on_either_thread_never_change_a_gradient(one_thread, monkeypatch):
    monkeypatch.setattr(Trial, "overlap", lambda self: True)
    net, x = net_and_input()
    reference = gradients(net, x)
    net.backward = "pareprop"
    first = gradients(net, x)
    for ours, true in zip(first, reference, strict=True):
        assert ((ours - true).abs().max() / true.abs().max()).item() <= 1e-10
    for _ in range(200):
        assert_equal(gradients(net, x), first)


def test_a_failing_recomputation_on_the_thread_is_raised(one_thread, monkeypatch):
    monkeypatch.setattr(Trial, "overlap", lambda self: True)
    net, x = net_and_input()
    net.backward = "pareprop"
    loss = sum(y.sum() for y in net(x, x))
    with torch.no_grad():
        net.blocks[0].f.inner.weight.zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


@pytest.mark.parametrize(("beside", "verdict"), [(0.9, True), (1.1, False)])
def test_the_faster_schedule_stays(beside, verdict):
    contest = Trial()
    seconds = {False: 1.0, True: beside}
    tried = []
    for _ in range(2 * (WARM_UPS + MEASURED)):
        tried.append(contest.overlap())
        contest.report(tried[-1], seconds[tried[-1]] * (100 if len(tried) <= 2 else 1))  # the first of each are slow
    assert tried.count(True) == tried.count(False) == WARM_UPS + MEASURED
    assert [contest.overlap() for _ in range(3)] == [verdict] * 3


def test_overlap_on_a_cpu_takes_single_threaded_work_and_spare_cores(one_thread, monkeypatch):
    stream = torch.zeros(2)
    kinds = [type(Overlap().begin(stream, movable=True)[0])]
    overlap = Overlap()
    overlap.begin(stream, movable=True)
    kinds.append(type(overlap.begin(stream, movable=True)[0]))
    assert kinds == [Lanes, ThreadLanes]
    assert type(overlap.begin(stream, movable=False)[0]) is Lanes
    monkeypatch.setattr(trial, "_cores", lambda: 1)
    assert all(overlap.begin(stream, movable=True)[1] is None for _ in range(4))
    monkeypatch.setattr(trial, "_cores", lambda: 2)
    torch.set_num_threads(2)
    assert all(overlap.begin(stream, movable=True)[1] is None for _ in range(4))


def test_what_was_learned_stays_with_the_sequence(one_thread):
    net, x = net_and_input()
    net.backward = "pareprop"
    gradients(net, x)
    assert len(net._overlap._trials) == 1
    assert not copy.deepcopy(net)._overlap._trials


def test_watchers_of_operations_see_them_all_in_turn(one_thread):
    from torch.utils.flop_counter import FlopCounterMode

    net, x = net_and_input()
    net.backward = "pareprop"
    counts = []
    for _ in range(3):
        with FlopCounterMode(display=False) as counter:
            gradients(net, x)
        counts.append(counter.get_total_flops())
    assert len(set(counts)) == 1 and not net._overlap._trials


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.cuda
@cuda
@pytest.mark.parametrize("ambient", ["default", "another"])
def test_random_delays_on_either_stream_never_change_a_gradient(ambient, monkeypatch):
    monkeypatch.setattr(Trial, "overlap", lambda self: True)
    net, x = net_and_input("cuda")
    reference = gradients(net, x)
    net.backward = "pareprop"
    stream = torch.cuda.Stream() if ambient == "another" else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        first = gradients(net, x)
        for _ in range(200):
            assert_equal(gradients(net, x), first)
    torch.cuda.synchronize()
    for ours, true in zip(first, reference, strict=True):
        assert ((ours - true).abs().max() / true.abs().max()).item() <= 1e-10


@pytest.mark.cuda
@cuda
def test_no_host_synchronisation_and_no_second_pool():
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
            loss = sum(net(x, x)).sum()
            loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_reserved() <= 1.5 * torch.cuda.max_memory_allocated()
