"""Plans of blocks that are recomputed from what is kept of their inputs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from small_planners import made, planner
from torch import nn
from tracked_memory import check_plan

from holotrain.models import GPT
from holotrain.models.block_schedules import schedule_blocks
from holotrain.planning import TrainingStep, simulate_step
from holotrain.planning.choice import MARGIN, TooSmall
from holotrain.planning.fake_tensors import fake_tensors
from holotrain.planning.memory_plan import choose_schedules, choose_tile, least_memory
from holotrain.schedules import PLAIN, SCHEDULES

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
    schedules = [name for name in PLAIN if device == "cuda" or not SCHEDULES[name].gpu]
    found = planner(Network, {}, batch=16, backward=None, device=device, listed=DEPTH, schedules=schedules)
    make = found.make_model

    def make_model(backward, depth):
        model = make(backward, depth)
        schedule_blocks(model, [backward] * DEPTH if isinstance(backward, str) else backward)
        return model

    object.__setattr__(found, "make_model", make_model)
    return found


@pytest.mark.parametrize("backward", PLAIN[2:])
def test_a_plan_is_what_the_tensors_of_a_step_take(backward):
    given = torch.zeros(32, 64, dtype=torch.int64)

    def step(fake=False):
        model = made(lambda: GPT(vocab=260, context=64, dim=64, depth=4, heads=4, backward=backward), fake)
        return TrainingStep(model, lambda: model(given, given), torch.optim.AdamW(model.parameters()), held={"batch": [given]})

    with fake_tensors():
        planned = simulate_step(step(fake=True))
    check_plan(planned, step())


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


def test_tiles_are_chosen_where_they_cost_less():
    """They cost less than recomputing most blocks."""
    plain, tiled = planner_of("cpu"), replace(planner_of("cpu"), tile=64)

    def bounded(of, most, least):
        def footprint(backward, batch=None, depth=None):
            blocks = [backward] * DEPTH if isinstance(backward, str) else backward
            share = blocks.count("autograd") / DEPTH
            return SimpleNamespace(bound=int(least + (most - least) * share))

        object.__setattr__(of, "footprint", footprint)

    bounded(plain, 100, 50)
    bounded(tiled, 60, 30)

    def chosen(budget, tiled=tiled):
        planner, choice = choose_tile(plain, tiled, budget, measure=False)
        return planner, choice.blocks.count("checkpoint")

    assert chosen(101) == (plain, 0)
    assert chosen(90)[0] is plain
    assert chosen(61) == (tiled, 0)
    assert chosen(31)[0] is tiled
    assert chosen(52, None)[0] is plain
    for budget, least in ((15, 30), (49, 50)):
        with pytest.raises(TooSmall) as refusal:
            chosen(budget, tiled if least == 30 else None)
        assert refusal.value.least == least


def test_inexact_schedules_are_chosen_only_where_they_are_allowed():
    exact, inexact = planner_of("cpu"), replace(planner_of("cpu"), inexact=True)
    peaks = {name: exact.footprint(name).bound for name in ("checkpoint", "checkpoint8")}
    budget = (peaks["checkpoint"] + peaks["checkpoint8"]) // 2
    with pytest.raises(TooSmall):
        choose_schedules(exact, budget, measure=False)
    object.__setattr__(inexact, "make_model", exact.make_model)
    blocks = choose_schedules(inexact, budget, measure=False).blocks
    assert set(blocks) == {"checkpoint8", "checkpoint"} and inexact.footprint(blocks).bound <= budget
