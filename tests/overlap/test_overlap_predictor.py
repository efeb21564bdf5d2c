"""Groups, the recurrence against an event simulation, the search against trying everything, links. Nothing is timed."""

import heapq
import itertools
import random
from dataclasses import replace

import pytest
import torch

from holotrain.overlap import predictor
from holotrain.overlap.groups import Columns, Job, group_sizes
from holotrain.overlap.predictor import Link, Predictor, makespan
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


@pytest.mark.parametrize(("collective", "covered"), [("all_reduce", False), ("all_reduce", True), ("reduce_scatter", False)])
def test_few_rows_are_cut_by_columns(collective, covered):
    """As if all time went into reading: each group of rows would read the whole weight."""
    of, link = Job(3, 4, 40, collective, 2, torch.float32, CPU, covered), Link(4e5, 1e-6)

    def reading(job, rows):
        return 1e-6 * (rows * job.inputs + job.inputs * job.outputs)

    from_reading = Predictor(reading, link)
    chosen, seconds = from_reading.best(of)
    assert isinstance(chosen, Columns) and len(chosen) > 1 and sum(chosen.sizes) == 40
    assert seconds < min(from_reading.seconds(of, rows) for rows in ([3], [2, 1], [1, 2], [1, 1, 1]))
    assert from_reading.seconds(of, Columns(2)) == from_reading.seconds(of, Columns([20, 20]))
    computed = [reading(of.turned, size) for size in chosen.sizes]
    sent = [link.seconds(collective, of.message(3) * size // 40, 2) for size in chosen.sizes]
    assert seconds == pytest.approx(simulated(computed, sent, 0.0, reading(of.turned, 40) if covered else 0.0))


@pytest.mark.parametrize(("collective", "rounds"), [("all_reduce", 2), ("reduce_scatter", 1)])
def test_a_link(collective, rounds):
    link = Link(100.0, 7.0, ramp=50.0)
    assert link.speed(50) == 50.0
    assert link.seconds(collective, 150, 4) == pytest.approx(7 + rounds * 3 / 4 * 150 / 75)
    assert link.seconds(collective, 0, 4) == link.seconds(collective, 150, 1) == 7


def test_on_a_gpu_groups_beside_a_collective_lose_what_it_takes(monkeypatch):
    for name, value in {"sms_of": lambda device: 4, "TILE_ROWS": 1, "TILE_COLUMNS": 6}.items():
        monkeypatch.setattr(predictor, name, value)
    link = Link(1e30, 0.0)
    seconds = Predictor(lambda job, rows: 1.0 * rows, link).seconds
    assert seconds(job(), [30]) == 30
    assert seconds(job(), [10, 20]) == pytest.approx(10 + 20 * 2)  # 5 waves of 4 SMs are 10 of 2
    assert seconds(job(collective="all_gather"), [10, 20]) == pytest.approx(10 * 2 + 20)
    # 4 columns by 30 rows of 6 are 20 tiles: 5 waves of 4 SMs, 10 of 2
    assert seconds(job(), Columns([2, 4])) == pytest.approx(2 + 4 * 2)


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
