"""What fits, the largest that does, which schedules are chosen, and steps in the backward."""

import itertools
import random
import runpy
import sys

import pytest
import torch
from small_models import IMAGE
from small_planners import made, planner
from torch import nn
from tracked_memory import check_plan

from holotrain.models import RevGPT, RevViT
from holotrain.optimizers import InBackward
from holotrain.planning import TrainingStep, simulate_step
from holotrain.planning.choice import Option, Stage, TooSmall, choose
from holotrain.planning.fake_tensors import fake_tensors
from holotrain.planning.memory_plan import choose_batch, choose_schedules, largest, largest_batch, make_plan
from holotrain.planning.planner import free_memory
from holotrain.tasks.optimizer_functions import adafactor, adamw, adamw_low_bit, muon, sgd


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


NAMES = ("reversible", "reversible+attention", "checkpoint", "autograd")


def stages(seed):
    generator = random.Random(seed)

    def options():
        held = sorted(generator.sample(range(1, 60), 3))
        costs = sorted(generator.sample(range(100, 140), 4), reverse=True)
        return [Option(name, size, cost) for name, size, cost in zip(NAMES, [0, *held], costs, strict=True)]

    return [Stage(generator.randint(1, 3), options()) for _ in range(2)]


def held(stages, blocks):
    names = iter(blocks)
    return sum({o.name: o.held for o in stage.options}[next(names)] for stage in stages for _ in range(stage.depth))


@pytest.mark.parametrize("seed", range(10))
def test_no_choice_that_fits_is_cheaper(seed):
    found = stages(seed)
    weights = 10_000
    budget = weights + 200 + random.Random(seed).randint(0, 200)

    def bound(blocks):
        return weights + held(found, blocks)

    choice = choose(found, bound, budget)
    each = [stage.options for stage in found for _ in range(stage.depth)]
    fitting = [
        sum(option.cost for option in options)
        for options in itertools.product(*each)
        if sum(option.held for option in options) <= (budget * 0.998 - weights) * (1 - len(each) / 2000)
    ]
    assert choice.bound == bound(choice.blocks) <= budget
    # Cells of the knapsack may round away what would fit by a hair.
    assert choice.cost <= min(fitting)


def test_what_is_left_over_is_given_out_again():
    """A peak that is less than the sum, since what the last blocks hold is free when the first are recomputed."""
    stage = Stage(10, [Option("reversible", 0, 4.0), Option("autograd", 100, 3.0)])

    def peak(blocks):
        return 1000 + 500 + max(0, 100 * blocks.count("autograd") - 500)

    assert choose([stage], peak, 1505).blocks.count("autograd") == 5
    assert choose([stage], peak, 1805).blocks.count("autograd") == 8
    assert choose([stage], peak, 2008).blocks.count("autograd") == 10


def convex(seed):
    generator = random.Random(seed)
    lines = [(generator.randint(0, 2000), generator.choice([0, 1, 7, 40, 133])) for _ in range(3)]
    return lambda size: max(start + slope * size for start, slope in lines)


@pytest.mark.parametrize("unit", [1, 8])
@pytest.mark.parametrize("seed", range(10))
def test_it_finds_what_trying_all_sizes_finds(seed, unit):
    peak = convex(seed)
    budget = random.Random(-seed - 1).randint(0, 6000)
    most = 400 * unit
    asked = []

    def counted(size):
        asked.append(size)
        assert 0 < size <= most and size % unit == 0
        return peak(size)

    start = random.Random(seed).randint(1, 50) * unit
    expected = max((size for size in range(unit, most + 1, unit) if peak(size) <= budget), default=0)
    assert largest(counted, budget, start, unit, most) == expected
    assert len(asked) == len(set(asked)) <= 14


def test_a_straight_line_takes_three_simulations():
    asked = []

    def line(size):
        asked.append(size)
        return 100 + 7 * size

    assert largest(line, 7100, 16) == 1000
    assert len(asked) == 3


SIZES = {"image_size": 32, "patch_size": 4, "dim": 64, "heads": 2, "classes": 10}


def step_of(make, optimizer, fake=True):
    model = made(make, fake)
    given = torch.zeros(8, 64, dtype=torch.int64) if isinstance(model, RevGPT) else torch.zeros(8, 3, 32, 32)
    words = (given, given) if isinstance(model, RevGPT) else (given,)
    loss = lambda: model(*words).square().mean()  # noqa: E731
    return TrainingStep(model, loss, InBackward(optimizer(model)), held={"batch": [given]})


def vit(backward):
    return RevViT(**SIZES, depth=2, backward=backward)


@pytest.mark.parametrize(
    ("make", "optimizer"),
    [
        (lambda: vit("pareprop"), sgd),
        (lambda: vit("checkpoint"), muon),
        (lambda: vit("reversible"), adamw_low_bit),
        (lambda: vit("reversible"), adafactor),
        (lambda: RevGPT(vocab=260, context=64, dim=64, depth=2, heads=4, backward="reversible"), adamw),
    ],
    ids=["sgd", "muon", "8 bits", "adafactor", "tied"],
)
def test_a_plan_is_what_the_tensors_take(make, optimizer):
    with fake_tensors():
        planned = simulate_step(step_of(make, optimizer))
    check_plan(planned, step_of(make, optimizer, fake=False))


def test_a_step_that_needs_the_gradients_is_no_step_in_the_backward():
    model = nn.Linear(2, 2)
    for options in ({"clip": 1.0}, {"batches": 2}, {"rewrite": lambda: None}):
        with pytest.raises(ValueError, match="needs gradients after the backward"):
            TrainingStep(model, lambda: None, InBackward(sgd(model)), **options)
    TrainingStep(model, lambda: None, InBackward(sgd(model)), clip=1.0, clip_value=True)
