"""Trainings on several devices, on paper: what their models consist of, and what a rank needs."""

import pytest
import torch
from small_models import CELLS, IMAGE, TEXT, WINDOWS
from small_planners import planner

from holotrain.models import RevGPT, RevViT, Swin
from holotrain.models.adapters import add_adapters, freeze
from holotrain.models.division import divide
from holotrain.models.image_error_diffusion import ImageErrorDiffusion
from holotrain.planning import make_plan, make_scaling
from holotrain.planning.step_times import Gpu, work_of


def adapted(model):
    add_adapters(model, 4)
    freeze(model, "adapters")


@pytest.mark.parametrize(
    ("make", "sizes", "change", "blocks", "share"),
    [
        (RevViT, IMAGE, None, 2, 0.9),
        (Swin, WINDOWS, None, 3, 0.5),
        (ImageErrorDiffusion, CELLS, None, 0, 0.0),
        (RevGPT, TEXT, None, 2, 0.3),
        (RevViT, IMAGE, adapted, 2, 0.9),
    ],
)
def test_units_are_the_whole_model(make, sizes, change, blocks, share):
    planned = planner(make, sizes, backward="autograd", change=change)
    units = work_of(planned, "autograd").units
    parameters = list(planned.make_model("autograd", None).parameters())
    assert sum(unit.parameters for unit in units) == sum(parameter.nbytes for parameter in parameters)
    assert [size for unit in units for size in unit.gradients] == [p.nbytes for p in parameters if p.requires_grad]
    assert sum(unit.block for unit in units) == blocks and not units[-1].block
    assert sum(unit.work for unit in units) == pytest.approx(1)
    assert share <= sum(unit.work for unit in units if unit.block) < 1


def test_where_no_time_is_known_memory_is_left(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device, budget, said in (
        ("cuda", None, "this machine has no such device; estimate with gpu="),
        ("cpu", 2**12, "does not fit"),
    ):
        planned = planner(device=device, schedules=("reversible",))
        plan = make_plan(planned, budget)
        assert plan.fits is (None if budget is None else False)
        found = make_scaling(planned, plan, 2, "nvlink", divide)
        assert all(prediction.memory and prediction.seconds is None for prediction in found.predictions)
        assert said in found.times.source
        assert not any("link" in line for line in found.assumptions)


@pytest.mark.slow
def test_a_rank_takes_less_the_more_there_are():
    planned = planner(device="cuda", schedules=("reversible",))
    plan = make_plan(planned, None)
    memory = {}
    for devices in (1, 2, 4):
        found = make_scaling(planned, plan, devices, "nvlink", divide, "H100", lambda name: Gpu(name, "fp32", 1e12, 132))
        assert all(prediction.seconds.low > 0 for prediction in found.predictions)
        if devices == 1:
            step = tuple(times.step for times in found.times.band)
            assert {(prediction.seconds.low, prediction.seconds.high) for prediction in found.predictions} == {step}
        memory[devices] = {found.strategy: found.memory for found in found.predictions}
        # These are latencies. If a share of the arithmetic were not one, they would be thousands of seconds.
        assert all(prediction.seconds.high < 1e-3 for prediction in found.predictions)
    assert set(memory[1].values()) == {plan.configured.bound}
    assert memory[2]["DDP"] == memory[4]["DDP"] > plan.configured.bound
    assert memory[4]["FSDP2"] < memory[2]["FSDP2"] < plan.configured.bound
    assert memory[2]["TP"] < memory[4]["TP"] < plan.configured.bound  # of two heads: four ranks have attention whole
