"""Configured runs on several devices, on paper: what their models consist of, and times of one device."""

import pytest
import torch
from omegaconf import OmegaConf

from holotrain.config import step_times as timing
from holotrain.config.build import build_data, build_task
from holotrain.config.build_plan import Planner
from holotrain.config.checkpointed import typed
from holotrain.config.composition import composed
from holotrain.config.make_plan import make_plan
from holotrain.config.make_scaling import make_scaling, parts
from holotrain.config.register import register

SMALL = ["model.dim=32", "model.heads=2", "model.depth=3"]


def planned(*words):
    """The configuration of ``plan``, and its data."""
    register()
    config = typed("plan", OmegaConf.to_container(composed("plan", ["trainer.accelerator=cpu", *words]), resolve=True))
    data = build_data(config)
    data.prepare_data()
    data.setup("fit")
    return config, data


@pytest.mark.parametrize(
    ("words", "blocks", "share"),
    [
        (SMALL, 3, 0.9),
        (["model=swin_nano", "data=fake", "data.image_size=32", "data.batch_size=2"], 6, 0.5),
        (["task=error_diffusion"], 0, 0.0),
        (["task=causal_lm", *SMALL, "data.context=32", "data.batch_size=2"], 3, 0.3),
        ([*SMALL, "model.adapters=4", "model.trained=adapters"], 3, 0.9),
    ],
)
def test_units_are_the_whole_model(words, blocks, share, tokens):
    config, data = planned(*words, *([f"data.cache_dir={tokens}"] if "task=causal_lm" in words else []))
    _, units = parts(Planner(config, data, "cpu"), config.batch_option[1], config.backward)
    parameters = list(build_task(config, data).model.parameters())
    assert sum(unit.parameters for unit in units) == sum(parameter.nbytes for parameter in parameters)
    assert [size for unit in units for size in unit.gradients] == [p.nbytes for p in parameters if p.requires_grad]
    assert sum(unit.block for unit in units) == blocks and not units[-1].block
    assert sum(unit.work for unit in units) == pytest.approx(1)
    assert share <= sum(unit.work for unit in units if unit.block) < 1


def test_estimates_are_flops_over_a_share_of_the_peak():
    config, data = planned(*SMALL, "trainer.accumulate_grad_batches=3", "trainer.precision=bf16-mixed")
    found = timing.estimated(Planner(config, data, "cuda"), (1e12, 3e12), "A100")
    fast, slow = found.band
    assert (fast.forward, slow.backward) == pytest.approx((1 / (0.55 * 312), 3 / (0.35 * 312)))
    assert (fast.update, fast.batches, found.sms) == (0, 3, 108)
    for word in ("estimated", "35% to 55%", "312 TFLOP/s of A100"):
        assert word in found.source
    config.trainer = config.trainer.with_arguments(precision="64-true")
    assert timing.estimated(Planner(config, data, "cuda"), (1e12, 3e12), "A100").band is None


def test_a_step_that_takes_long_is_timed_with_less(monkeypatch):
    config, data = planned(*SMALL, "data.batch_size=32")
    asked = []

    def timed(step, place):
        asked.append(len(step.held["batch"][0]))
        return timing.Times(0.01 * asked[-1], 0.02 * asked[-1], 0.2)

    monkeypatch.setattr(timing, "_timed", timed)
    (fast, slow), how = timing.measured(Planner(config, data, "cpu"), config.backward, lambda what: None)
    assert set(asked) == {1, 4} and "data.batch_size=4, in proportion" in how
    assert (fast.forward, fast.backward, fast.update) == pytest.approx((0.32, 0.64, 0.2)) and fast == slow


def test_a_step_is_timed_as_the_device_takes_it():
    config, data = planned(*SMALL, "data.batch_size=8", "trainer.precision=bf16-mixed")
    said = []
    found = timing.step_times(Planner(config, data, "cpu"), config.backward, (1, 1), None, None, said.append)
    fast, slow = found.band
    assert 0 < fast.step <= slow.step and min(fast.forward, fast.backward, fast.update) > 0
    assert found.source.startswith("measured on the CPU") and "data.batch_size=8" in said[-1]


@pytest.mark.slow
def test_where_no_time_is_known_memory_is_left(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config, data = planned(*SMALL, "devices=2", "device=cuda")
    plan = make_plan(config, data, "cuda", None)
    found = make_scaling(config, data, plan)
    assert all(prediction.memory and prediction.seconds is None for prediction in found.predictions)
    assert "this machine has no such device; estimate with gpu=" in found.times.source
    assert not any("link" in line for line in found.assumptions)
    plan = make_plan(config, data, "cpu", 2**20)
    assert plan.fits is False
    assert "does not fit" in make_scaling(config, data, plan).times.source


@pytest.mark.slow
def test_a_rank_takes_less_the_more_there_are():
    config, data = planned(*SMALL, "devices=1", "device=cuda", "gpu=H100")
    plan = make_plan(config, data, "cuda", None)
    memory = {}
    for config.devices in (1, 2, 4):
        memory[config.devices] = {found.strategy: found.memory for found in make_scaling(config, data, plan).predictions}
    assert set(memory[1].values()) == {plan.configured.bound}
    assert memory[2]["DDP"] == memory[4]["DDP"] > plan.configured.peak
    assert memory[4]["FSDP2"] < memory[2]["FSDP2"] < plan.configured.peak
    assert memory[2]["TP"] < memory[4]["TP"] < plan.configured.peak  # of two heads: four ranks have attention whole
