"""What fits, the largest that does, which schedules are chosen, and steps in the backward."""

import itertools
import random

import pytest
import torch
from covering import slow
from small_models import IMAGE
from small_planners import made, planner
from torch import nn
from tracked_memory import check_plan

from holotrain.models import GPT, RevGPT, RevViT
from holotrain.models.block_schedules import schedule_blocks
from holotrain.optimizers import InBackward
from holotrain.planning import TrainingStep, simulate_step
from holotrain.planning.choice import MARGIN, Option, Stage, TooSmall, choose
from holotrain.planning.fake_tensors import fake_tensors
from holotrain.planning.memory_plan import (
    choose_schedules,
    largest,
    largest_batch,
    least_memory,
    make_plan,
)
from holotrain.planning.planner import free_memory
from holotrain.schedules import COMPILED, EAGER, SCHEDULES
from holotrain.tasks.optimizer_functions import adafactor, adamw, adamw_low_bit, muon


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
        slow(lambda: vit("checkpoint"), muon),
        slow(lambda: vit("reversible"), adamw_low_bit),
        (lambda: vit("pareprop"), adafactor),
        (lambda: RevGPT(vocab=260, context=64, dim=64, depth=2, heads=4, backward="reversible"), adamw),
    ],
    ids=["muon", "8 bits", "adafactor", "tied"],
)
def test_a_plan_is_what_the_tensors_take(make, optimizer):
    with fake_tensors():
        planned = simulate_step(step_of(make, optimizer))
    check_plan(planned, step_of(make, optimizer, fake=False))


# Blocks that are recomputed from what is kept of their inputs.

DEPTH = 8


class Network(nn.Module):
    """A list of blocks that knows nothing of schedules."""

    def __init__(self, image_size=0, depth=DEPTH):
        super().__init__()
        self.embed = nn.Linear(8, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(depth))

    def forward(self, x):
        x = self.embed(x).expand(-1, 4, -1, -1)
        for block in self.blocks:
            x = x + block(x)
        return x


def planner_of(device):
    """Of a model of others, with equal blocks in a list."""
    schedules = [name for name in EAGER if device == "cuda" or not SCHEDULES[name].gpu]
    found = planner(Network, {}, batch=16, backward=None, device=device, listed=DEPTH, schedules=schedules)
    make = found.make_model

    def make_model(backward, depth):
        model = make(backward, depth)
        schedule_blocks(model, [backward] * DEPTH if isinstance(backward, str) else backward)
        return model

    object.__setattr__(found, "make_model", make_model)
    return found


@pytest.mark.parametrize("backward", EAGER[2:])
def test_a_plan_of_recomputed_blocks_is_what_the_tensors_take(backward):
    given = torch.zeros(32, 64, dtype=torch.int64)

    def step(fake=False):
        model = made(lambda: GPT(vocab=260, context=64, dim=64, depth=2, heads=4, backward=backward), fake)
        return TrainingStep(model, lambda: model(given, given), torch.optim.AdamW(model.parameters()), held={"batch": [given]})

    with fake_tensors():
        planned = simulate_step(step(fake=True))
    check_plan(planned, step())


def test_compiled_blocks_are_planned_as_without_the_compiler():
    """With a budget as if they stored everything; and they are not chosen."""
    found = planner_of("cpu")
    for name, planned in (("compiled", "checkpoint"), ("compiled8", "checkpoint8"), ("compiled:0.3", "autograd")):
        assert found.footprint(name) == found.footprint(planned)
    assert not {*COMPILED} & {*found.schedules}


def test_the_choice_goes_from_stored_to_checkpointed_to_offloaded():
    """Never to what makes gradients inexact, and on a CPU not to main memory, which is all it has."""
    on_gpu, on_cpu = planner_of("cuda"), planner_of("cpu")
    assert (least_memory(on_gpu), least_memory(on_cpu)) == ("offload", "checkpoint")
    peaks = {name: on_gpu.footprint(name).bound for name in on_gpu.schedules}
    assert peaks["offload"] < peaks["checkpoint"] < peaks["autograd"]

    def chosen(budget):
        return choose_schedules(on_gpu, int(budget), measure=False).blocks

    assert chosen(1.01 * peaks["autograd"]) == ["autograd"] * DEPTH
    assert set(chosen((peaks["autograd"] + peaks["checkpoint"]) / 2)) == {"checkpoint", "autograd"}
    assert chosen(peaks["offload"]) == ["offload"] * DEPTH
    two = ["offload"] * 2 + ["checkpoint"] * (DEPTH - 2)
    assert chosen(on_gpu.footprint(two).bound / (1 - MARGIN) + 1) == two
