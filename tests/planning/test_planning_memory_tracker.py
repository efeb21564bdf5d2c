"""MemoryTracker: memory at named places of a plain script."""

import gc
import warnings

import pytest
import torch

from holotrain.planning import MemoryTracker, memory_tracker
from holotrain.planning.probes import LinuxProbe, Probe

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


@pytest.mark.parametrize(
    ("levels", "leaks"),
    [
        ((5, 1, 2, 3, 4, 5, 6), True),  # whatever the first is
        ((1, 2, 3, 4, 5, 6), False),  # one round too few
        ((1, 9, 9, 9, 9, 9, 9, 9), False),
        ((1, 2, 3, 4, 3, 5, 6, 7), False),
        ((1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6), False),  # less than 1 MiB
    ],
)
def test_steady_growth_of_a_name_is_a_leak(monkeypatch, levels, leaks):
    tracker = tracker_of(monkeypatch, *(level for each in levels for level in (each, 50)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in levels:
            tracker.snapshot("step")
            tracker.snapshot("steady")
    assert [str(each.message).split(":")[0] for each in caught] == leaks * [
        "memory 'step' has grown in each of 5 rounds, by 5 MiB in all"
    ]
    assert ("step grows: 5 MiB in the last 5 rounds" in tracker.report()) == leaks
    assert caught == [] or caught[0].filename == __file__


def test_a_long_run_keeps_few_snapshots_and_clear_forgets_them(monkeypatch):
    tracker = tracker_of(monkeypatch, *range(1, 1008))
    with pytest.warns(UserWarning, match="has grown"):
        for _ in range(1000):
            tracker.snapshot("step")
    assert tracker.report().splitlines()[1].split() == ["step", "1000.0", "+1.0", "+999.0", "1003.0"]
    assert len(tracker._recent["step"]) == memory_tracker.ROUNDS
    tracker.clear()
    assert tracker.report().splitlines()[1:] == []
    assert tracker.snapshot("step").change == 0
    with pytest.warns(UserWarning, match="has grown"):  # again
        for _ in range(6):
            tracker.snapshot("step")


def test_the_highest_memory_so_far_is_no_leak(monkeypatch):
    levels = iter(range(MIB, 100 * MIB, MIB))
    monkeypatch.setattr(Probe, "read", lambda self: (next(levels),) * 2)
    monkeypatch.setattr(memory_tracker, "probe_of", lambda device: Probe())
    tracker = MemoryTracker("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(8):
            tracker.snapshot("step")
    assert "grows" not in tracker.report()


def test_cuda_is_initialised_before_its_statistics_are_reset(monkeypatch):
    called = []
    monkeypatch.setattr(torch.cuda, "init", lambda: called.append("init"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: called.append("reset"))
    MemoryTracker("cuda")
    assert called == ["init", "reset"]


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
    with pytest.warns(UserWarning, match="memory 'kept' has grown"):
        for _ in range(7):
            kept.append(torch.ones(64 * MIB // 4, device=device))
            tracker.snapshot("kept")
