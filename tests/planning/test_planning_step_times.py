"""The time of a step: estimated from FLOPs, and measured."""

from itertools import cycle

import pytest
from small_planners import planner

from holotrain.planning import step_times as timing
from holotrain.planning.scaling import Unsharded
from holotrain.planning.step_times import Gpu, Work, work_of


def test_estimates_are_flops_over_a_share_of_the_peak():
    work = Work(1e12, 3e12, [], batches=3, whole=Unsharded())
    found = timing.estimated(work, Gpu("A100", "bf16-mixed", 312e12, 108))
    fast, slow = found.band
    assert (fast.forward, slow.backward) == pytest.approx((1 / (0.55 * 312), 3 / (0.35 * 312)))
    assert (fast.update, fast.batches, found.sms) == (0, 3, 108)
    for word in ("estimated", "35% to 55%", "312 TFLOP/s of A100"):
        assert word in found.source
    unknown = timing.estimated(work, Gpu("A100", "64-true", None, 108))
    assert unknown.band is None and unknown.source.endswith("the table has no peak of A100 in 64-true")


def test_a_step_that_takes_long_is_timed_with_less(monkeypatch):
    asked = []

    def timed(step, place):
        asked.append(len(step.held["batch"][0]))
        return timing.Times(0.01 * asked[-1], 0.02 * asked[-1], 0.2)

    monkeypatch.setattr(timing, "_timed", timed)
    (fast, slow), how = timing.measured(planner(batch=32), "reversible", lambda what: None)
    assert set(asked) == {1, 4} and "batch=4, in proportion" in how
    assert (fast.forward, fast.backward, fast.update) == pytest.approx((0.32, 0.64, 0.2)) and fast == slow


def test_a_step_is_timed_as_the_device_takes_it(monkeypatch):
    monkeypatch.setattr(timing, "SECONDS", 1e6)  # also on a busy machine no smaller batch is timed
    monkeypatch.setattr(timing, "ROUNDS", 2)
    planned, said = planner(batch=8, half=True, batches=2), []
    found = timing.step_times(planned, "reversible", work_of(planned, "reversible"), None, Gpu, None, said.append)
    fast, slow = found.band
    assert 0 < fast.step <= slow.step and min(fast.forward, fast.backward, fast.update) > 0 and fast.batches == 2
    assert found.source.startswith("measured on the CPU") and "batch=8" in said[-1]
    times = cycle([timing.Times(1.0, 1.0, 5.0), timing.Times(2.0, 2.0, 2.0)])  # of one batch the first is the slowest
    monkeypatch.setattr(timing, "_timed", lambda *_: next(times))
    found = timing.step_times(planned, "reversible", work_of(planned, "reversible"), None, Gpu, None, said.append)
    assert [each.step for each in found.band] == [9.0, 10.0]
