"""The watch of two processes, both in this one: who is dead, who hangs, what all are told."""

import time
from datetime import timedelta
from functools import partial
from itertools import count
from threading import Event
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from holotrain.ranks import watch
from holotrain.ranks.launch import LOOPBACK
from holotrain.ranks.place import Place
from holotrain.ranks.progress import Position, waited_for

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")

TIMEOUT = 30.0


@pytest.fixture
def watches(monkeypatch):
    """Two watches, the positions that they tell of, and how time passes: beat by beat, by a clock that is set here."""
    clock = SimpleNamespace(now=100.0, sleep=time.sleep)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(watch, "time", clock)
    monkeypatch.setattr(watch, "BEAT", 0.05)
    monkeypatch.setattr(watch, "GRACE", 600)  # a verdict is to end nothing here
    store = dist.TCPStore(LOOPBACK, 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    positions = [Position(0, {"all": 7}), Position(0, {"all": 7})]
    places = [Place(rank, 2, rank, 2, LOOPBACK, store.port, hosts=rank == 0) for rank in (0, 1)]
    made = [watch.Watch(place, TIMEOUT, partial(positions.__getitem__, place.rank)) for place in places]
    numbers = count(1)

    def pass_by(seconds: int, beating=made) -> None:
        for _ in range(seconds):
            clock.now += 1
            for each in beating:
                if each.verdict is None:
                    each._beat(next(numbers))

    yield made, positions, pass_by
    for each in made:
        each.stop()
    del store


@pytest.mark.parametrize("late", [0, 1])
def test_whoever_is_behind_and_stands_still_hangs(watches, late):
    """It gives signs of life all the same; the others wait for it, one collective on."""
    made, positions, pass_by = watches
    positions[1 - late] = Position(0, {"all": 8})
    pass_by(30)
    assert [each.verdict for each in made] == [None, None]
    pass_by(3)
    for each in made:
        assert each.verdict.what.startswith(f"rank {late} hangs: the others have waited for it for")


def test_one_that_has_ended_its_job_is_ahead_of_one_that_has_not(watches):
    made, positions, pass_by = watches
    positions[0] = Position(1)  # its groups are gone
    pass_by(33)
    assert made[0].verdict.what.startswith("rank 1 hangs")


def test_nobody_hangs_who_is_as_far_as_the_others_or_goes_on(watches):
    made, positions, pass_by = watches
    for step in range(100):  # rank 1 is slow
        positions[0] = Position(0, {"all": 9 + step})
        positions[1] = Position(0, {"all": 8 + step})
        pass_by(1)
    positions[1] = positions[0]
    pass_by(90)  # a long piece of work without collectives, from which one comes back a little earlier
    positions[0] = Position(0, {"all": 200})
    pass_by(20)
    assert [each.verdict for each in made] == [None, None]


def test_a_verdict_reaches_all_with_its_status_and_the_first_one_counts(watches):
    made, _, pass_by = watches
    assert made[1].failed("rank 1: no such file", 2).status == 2
    pass_by(1)
    assert (made[0].verdict.what, made[0].verdict.status) == ("rank 1: no such file", 2)
    made[0].verdict = None
    assert made[0].failed("rank 1 died").what == "rank 1: no such file"


def test_whoever_falls_silent_is_dead(watches):
    made, _, pass_by = watches
    pass_by(1)
    pass_by(33, beating=made[:1])
    assert made[0].verdict.what.startswith("rank 1 died or hangs: no heartbeat for")


@pytest.mark.parametrize(
    ("positions", "found"),
    [
        ({0: {"all": 5}, 1: {"all": 5}}, []),
        ({0: {"all": 5}, 1: {"all": 4}}, [1]),
        # 0 and 1 share layers out, and 2 and 3; 0 and 2 share data, and 1 and 3: 2 waits for 0, and 0 for 1
        ({0: {"a": 9, "c": 3}, 1: {"a": 8, "d": 3}, 2: {"b": 9, "c": 4}, 3: {"b": 9, "d": 3}}, [1]),
        # one has let a group go that another still has
        ({0: {"all": 5}, 1: {"all": 5, "agreement": 50}}, []),
        ({0: {"all": 6}, 1: {"all": 5, "agreement": 50}}, [1]),
        # each waits for the other: nobody can say who began
        ({0: {"a": 5, "b": 4}, 1: {"a": 4, "b": 5}}, []),
    ],
)
def test_whom_the_others_wait_for(positions, found):
    assert waited_for({rank: Position(0, launched) for rank, launched in positions.items()}) == found


def test_a_process_that_does_not_end_after_a_verdict_is_ended(watches, monkeypatch, capfd):
    made, *_ = watches
    ended = Event()
    monkeypatch.setattr(watch, "GRACE", 0.1)
    monkeypatch.setattr(watch.os, "_exit", lambda status: (statuses.append(status), ended.set()))
    statuses: list[int] = []
    made[0].hint = lambda: "; resume with: ..."
    made[0].start()
    made[0].failed("rank 1: no such file", 2)
    assert ended.wait(100)
    assert statuses == [2] and "holotrain: rank 1: no such file; resume with: ...\n" in capfd.readouterr().err
