"""Groups, the recurrence against an event simulation, the search against trying everything, links. Nothing is timed."""

import heapq
import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from holotrain.overlap import predictor
from holotrain.overlap.groups import Columns, Job, group_sizes
from holotrain.overlap.predictor import Link, MeasuredLink, Predictor, makespan
from holotrain.overlap.signals import Overlap

CPU = torch.device("cpu")


def job(rows: int = 30, collective: str = "all_reduce", covered: bool = False, ranks: int = 2) -> Job:
    return Job(rows, 4, 6, collective, ranks, torch.float32, CPU, covered)


def simulated(first, second, busy=0.0, after=0.0) -> float:
    """The same by events: a worker that computes in turn, a link that takes the oldest message that waits."""
    events = [(busy, "link is free"), (0.0, "worker is free")]
    heapq.heapify(events)
    waiting, sending, at, last = [], True, 0, 0.0
    behind = [after]
    while events:
        now, what = heapq.heappop(events)
        if what == "worker is free":
            last = max(last, now)
            if at < len(first):
                heapq.heappush(events, (now + first[at], "computed"))
            elif behind:
                heapq.heappush(events, (max(now, busy) + behind.pop(), "worker is free"))
        elif what == "computed":
            waiting.append(at)
            at += 1
            heapq.heappush(events, (now, "worker is free"))
        else:
            sending, last = False, max(last, now)
        if waiting and not sending:
            sending = True
            heapq.heappush(events, (now + second[waiting.pop(0)], "link is free"))
    return last


@pytest.mark.parametrize("seed", range(40))
def test_the_recurrence_is_what_a_simulation_of_events_finds(seed):
    chance = random.Random(seed)
    groups = chance.randint(1, 12)
    first, second = ([chance.choice([0.0, chance.random()]) for _ in range(groups)] for _ in range(2))
    busy, after = (chance.choice([0.0, 3 * chance.random()]) for _ in range(2))
    assert makespan(first, second, busy, after) == pytest.approx(simulated(first, second, busy, after))


def saturating(job: Job, rows: int) -> float:
    """A product that small groups use badly."""
    return 1e-3 + 1e-4 * rows


KINDS = [("all_reduce", {}), ("reduce_scatter", {}), ("all_gather", {}), ("all_to_all", {}), ("all_to_all", {"before": True})]
KINDS += [(collective, {"covered": True}) for collective in ("all_reduce", "reduce_scatter", "all_to_all")]


@pytest.mark.parametrize(("collective", "kind"), KINDS)
@pytest.mark.parametrize("bandwidth", [1e4, 1e5, 1e6])
def test_the_best_is_the_best_of_everything(collective, kind, bandwidth):
    link = Link(bandwidth, 1e-3)
    of = replace(job(6, collective), **kind)
    covered = of.covered
    chosen, seconds = Predictor(saturating, link).best(of)

    def tried(sizes):
        computed = [saturating(of, size) for size in sizes]
        sent = [link.seconds(collective, of.message(size), 2) for size in sizes]
        if collective == "all_gather" or of.before:
            return simulated(sent, computed)
        again = link.seconds("all_gather", of.message(6), 2) if covered and collective == "reduce_scatter" else 0.0
        return simulated(computed, sent, again, saturating(of, 6) if covered else 0.0)

    everything = [sizes for n in range(1, 7) for sizes in itertools.product(range(1, 7), repeat=n) if sum(sizes) == 6]
    least = min(map(tried, everything))
    assert tried(chosen) == pytest.approx(seconds)
    assert least <= seconds * (1 + 1e-12) <= 1.00501 * least
    assert len(chosen) == min(len(sizes) for sizes in everything if tried(sizes) <= 1.005 * least)


@pytest.mark.parametrize("rows", [16896, 33792])
def test_groups_of_a_gpu_are_whole_waves_which_take_longer_beside_a_collective(rows, monkeypatch):
    """132 SMs and tiles of 128 x 128: a wave of 1,408 outputs is 12 rows of 11 tiles. Two SMs go to the collective."""
    monkeypatch.setattr(predictor, "sms_of", lambda device: 132)
    of, link = Job(rows, 4, 1408, "all_reduce", 2, torch.float32, CPU), Link(1e8, 1e-5)
    sizes, seconds = Predictor(saturating, link).best(of)
    assert len(sizes) > 1 and all(size % (12 * 128) == 0 for size in sizes[:-1])

    def computed(size: int, sms: int) -> float:
        tiles = math.ceil(size / 128) * 11
        return saturating(of, size) * math.ceil(tiles / sms) / math.ceil(tiles / 132)

    first = [computed(size, 130 if number else 132) for number, size in enumerate(sizes)]
    assert seconds == pytest.approx(simulated(first, [link.seconds("all_reduce", 4 * 1408 * size, 2) for size in sizes]))
    assert sum(first) > 1.001 * sum(saturating(of, size) for size in sizes)


@pytest.mark.parametrize("size", [1, 8, 100, 480, 700, 960])
def test_a_measured_link_is_linear_between_its_measurements(size):
    times = {8: 1e-6, 480: 2e-4, 960: 3e-4}
    found = MeasuredLink({"all_reduce": times}).seconds("all_reduce", size, 2)
    assert found == pytest.approx(np.interp(size, [*times], [*times.values()]))


@pytest.mark.parametrize(
    ("groups", "words"),
    [(lambda job, of, sizes=sizes: sizes, "were chosen for 7 rows") for sizes in ([3, 3], [8, -1], [0, 7], [])]
    + [(Columns(sizes), "were chosen for 6 columns") for sizes in ([3, 4], [7, -1], [6, 0])]
    + [(groups, "groups must be an integer, Columns") for groups in (True, 2.0)]
    + [(0, "1 or more, not 0"), (Columns(0), "1 or more, not 0")],
)
def test_groups_that_cannot_be_are_refused(groups, words):
    with pytest.raises((TypeError, ValueError), match=words):
        group_sizes(Overlap(None, groups).groups, job(7), None)
