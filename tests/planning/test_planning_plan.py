"""What fits, and the largest that does, for plain models."""

import runpy
import sys

import pytest
from small_models import IMAGE
from small_planners import planner

from holotrain.planning.choice import TooSmall
from holotrain.planning.memory_plan import choose_batch, choose_schedules, largest_batch, make_plan
from holotrain.planning.planner import free_memory


def test_what_must_fit_is_the_bound():
    planned = planner(sizes=IMAGE | {"dim": 96, "heads": 3, "depth": 1}, batch=128, schedules=("reversible",))
    footprint = planned.footprint("reversible")
    assert largest_batch(planned, "reversible", footprint.bound, most=128).value == 128
    assert make_plan(planned, footprint.bound).fits
    plan = make_plan(planned, footprint.bound - 1)
    assert footprint.peak < plan.budget and not plan.fits
    assert 0 < largest_batch(planned, "reversible", plan.budget, most=128).value < 128
    figures = plan.as_json()["footprints"]["reversible"]
    assert figures["bound"] == plan.configured.bound == figures["peak"] + figures["scratch"]
    with pytest.raises(TooSmall):
        choose_schedules(planned, plan.budget)


def test_a_batch_that_is_chosen_leaves_a_margin():
    planned = planner(batch=1)
    budget = planned.footprint("reversible", 9).bound
    size = choose_batch(planned, budget)
    assert planned.footprint("reversible", size).bound <= 0.998 * budget < planned.footprint("reversible", size + 1).bound
    with pytest.raises(TooSmall) as error:
        choose_batch(planned, budget, least=size + 1)
    assert error.value.least == planned.footprint("reversible", size + 1).bound


def test_schedules_that_are_open_are_chosen_within_the_budget():
    planned = planner(batch=16, backward=None, schedules=("autograd", "reversible"))
    least, most = (planned.footprint(name).bound for name in ("reversible", "autograd"))
    plan = make_plan(planned, (least + most) // 2)
    assert plan.backward == "auto" and plan.schedule == plan.choice.blocks and len(plan.schedule) == 2
    assert plan.configured.bound == plan.choice.bound <= plan.budget
    small = make_plan(planned, least - 1)
    assert (small.backward, small.choice, small.fits) == ("reversible", None, False)


def test_the_free_memory_is_that_of_the_tightest_limit(monkeypatch, tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 7 kB\n")
    monkeypatch.setattr("holotrain.planning.planner.MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr("holotrain.planning.planner.CONTAINER", tmp_path)
    monkeypatch.setattr("resource.getrlimit", lambda kind: (-1, -1))
    assert free_memory("cpu") == 7 * 1024
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("4500\n")
    (tmp_path / "memory.stat").write_text("anon 1500\nfile 3000\ninactive_file 2000\nactive_file 500\n")
    assert free_memory("cpu") == 3000
    (tmp_path / "meminfo").unlink()
    assert free_memory("cpu") is None


def test_a_system_that_tells_nothing_has_no_known_memory(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "resource", None)  # as on Windows
    found = runpy.run_path(sys.modules["holotrain.planning.planner"].__file__)["free_memory"]
    monkeypatch.setitem(found.__globals__, "MEMINFO", tmp_path / "meminfo")
    assert found("cpu") is None
