"""MemoryTracker: memory at named places of a plain script."""

import gc
import math
import random
import warnings

import pytest
import torch

from holotrain.planning import MemoryTracker, memory_tracker
from holotrain.planning.memory_tracker import LinuxProbe
from holotrain.planning.tracker import AllocationTracker

MIB = 2**20


class Levels:
    """A probe that reads the given levels, one after another."""

    def __init__(self, levels):
        self.levels = iter(levels)

    def reset(self):
        pass

    def read(self):
        level = next(self.levels)
        return level + 3 * MIB, level


def tracker_of(monkeypatch, *levels) -> MemoryTracker:
    monkeypatch.setattr(memory_tracker, "probe_of", lambda device: Levels(MIB * level for level in levels))
    return MemoryTracker("cpu")


def test_the_report_has_changes_and_peaks(monkeypatch):
    tracker = tracker_of(monkeypatch, 10, 30, 12, 31)
    for _ in range(2):
        tracker.snapshot("start")
        tracker.snapshot("after forward")
    table = [line.split() for line in tracker.report().splitlines()[1:]]
    assert table == [["start", "12.0", "-18.0", "+2.0", "15.0"], ["after", "forward", "31.0", "+19.0", "+1.0", "34.0"]]
    assert MemoryTracker("cpu").report().splitlines()[1:] == []


def warned_rounds(monkeypatch, curve, rounds, noise=0.0):
    """The rounds in which a curve of MiB by round, over what stays at 500 MiB, was called a leak; and the tracker."""
    draw = random.Random(0)
    levels = [500 + curve(number) + draw.gauss(0, noise) for number in range(rounds)]
    tracker, found = tracker_of(monkeypatch, *(level for each in levels for level in (each, 50))), []
    for number in range(rounds):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tracker.snapshot("step")
            tracker.snapshot("steady")
        found += [(number, str(each.message)) for each in caught]
        assert all(each.filename == __file__ for each in caught)
    return found, tracker


@pytest.mark.parametrize(
    ("every", "rate", "noise", "before"), [(1, 8, 0, 16), (2, 8, 0, 16), (5, 8, 5, 64), (2, 1, 5, 512), (1, 0.2, 5, 2048)]
)
def test_a_leak_is_told_once_the_later_the_slower_it_is(monkeypatch, every, rate, noise, before):
    found, tracker = warned_rounds(monkeypatch, lambda number: number // every * rate * every, 4000, noise)
    ((number, said),) = found
    assert before / 8 <= number <= before * (1 if every < 5 else 2)
    assert said.startswith("memory 'step' grows")
    assert "step grows" in tracker.report() and "steady grows" not in tracker.report()


@pytest.mark.parametrize("noise", [0, 5])
@pytest.mark.parametrize(
    "curve",
    [
        lambda number: 0,
        lambda number: -100 * (number == 0),  # what is made in the first round
        lambda number: 300 * (1 - math.exp(-number / 10)),  # an allocator's warm-up
        lambda number: 100 * math.log1p(number),  # the longest batch so far
        lambda number: 400 * (number > 1000),  # a table that is built once
        lambda number: 50 * (number % 6),  # a buffer that is emptied when it is full
        lambda number: 0.02 * number * (number < 40),  # less than 1 MiB
    ],
)
def test_what_is_no_leak_is_not_told(monkeypatch, curve, noise):
    found, tracker = warned_rounds(monkeypatch, curve, 4000, noise)
    assert not found and "grows" not in tracker.report()


DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not LinuxProbe.works(), reason="needs Linux")),
    pytest.param("cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]),
]


@pytest.mark.parametrize("device", DEVICES)
def test_real_tensors(device):
    """Of 64 MiB each: smaller ones may take the place of what earlier tests have freed, and the process does not grow."""
    gc.collect()
    tracker, kept = MemoryTracker(device), []
    tracker.snapshot("start")
    large = torch.ones(64 * MIB // 4, device=device)
    with_it = tracker.snapshot("with a tensor")
    del large
    without = tracker.snapshot("without it")
    assert with_it.in_use - without.in_use == pytest.approx(64 * MIB, rel=0.1)
    assert without.peak >= with_it.in_use - 8 * MIB
    with pytest.warns(UserWarning, match="memory 'kept' grows"):
        for _ in range(17):
            kept.append(torch.ones(64 * MIB // 4, device=device))
            tracker.snapshot("kept")


class Twice(torch.autograd.Function):
    """Keeps another name for the gradient that it returns."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Twice.kept = 2 * gradient
        Twice.kept, returned = Twice.kept.detach(), Twice.kept
        return returned


class Exp(torch.autograd.Function):
    """Has a second derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, gradient):
        return torch.exp(ctx.saved_tensors[0] * gradient)


def test_tracking_changes_no_number():
    def figures() -> list[float]:
        x = torch.ones(3, requires_grad=True)
        (x.sin() + Twice.apply(x)).sum().backward()
        (first,) = torch.autograd.grad((x.sin() + Exp.apply(x)).sum(), x, create_graph=True)
        return [*Twice.kept.tolist(), *torch.autograd.grad(first.sum(), x)[0].tolist()]

    expected, tracker = figures(), AllocationTracker()
    tracker.enter("backward")
    with tracker.tracking():
        assert figures() == expected
