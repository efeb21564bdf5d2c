"""Plans of configured runs, task by task, against the same step on real tensors."""

from dataclasses import replace

import pytest
from omegaconf import OmegaConf
from tracked_memory import check_plan

from holotrain.config.build import build_data, build_task
from holotrain.config.build_plan import Planner, training_step
from holotrain.config.checkpointed import typed
from holotrain.config.choose_backward import settle
from holotrain.config.choose_batch import largest_batch
from holotrain.config.composition import composed
from holotrain.config.make_plan import Plan
from holotrain.config.register import register
from holotrain.config.schema.backward import BackwardConfig
from holotrain.data.example import example_batch
from holotrain.errors import UserError
from holotrain.planning.scratch import HALF

SMALL = ["model.dim=96", "model.heads=3", "model.depth=2"]
TEXT = [*SMALL, "data.context=64"]
CASES = {
    "images": [*SMALL, "data.batch_size=128"],
    "images, mixed": [*SMALL, "data.batch_size=128", "data.mixup_alpha=0.2", "trainer.precision=bf16-mixed"],
    "causal_lm, muon": ["task=causal_lm", *TEXT, "data.batch_size=16"],
    "masked_lm": ["task=masked_lm", *TEXT, "data.max_tokens=2048"],
    "masked_lm, plain": ["task=masked_lm", "model=roberta_tiny", *TEXT, "data.max_tokens=2048"],
    "sequence_classification": ["task=sequence_classification", *TEXT, "data.max_tokens=2048"],
    "in double precision": [*SMALL, "trainer.precision=64-true"],
    "with an average": [*SMALL, "callbacks=ema"],
    "with a hologram": [*SMALL, "synthesis=associative"],
    "adapters alone": [*SMALL, "model.adapters=8", "model.trained=adapters"],
    "exact": [*SMALL, "backward.exact=true"],
    "gradients that add up": [*SMALL, "trainer.accumulate_grad_batches=4"],
    "a schedule a block": [*SMALL, "backward=auto", "backward.blocks=[reversible+attention,checkpoint]"],
}
SOON = (
    "images, mixed", "causal_lm, muon", "masked_lm", "with an average", "with a hologram", "adapters alone",
    "a schedule a block",
)  # fmt: skip
"""What is planned each time; the others are slow tests."""


def configured(name, tokens):
    words = ["trainer.accelerator=cpu", *CASES[name]]
    if "lm" in name or "sequence" in name:
        words.append(f"data.cache_dir={tokens}")
    register()
    config = typed("fit", OmegaConf.to_container(composed("fit", words), resolve=True))
    data = build_data(config)
    data.prepare_data()
    data.setup("fit")
    return config, data


@pytest.mark.parametrize("name", [name if name in SOON else pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_a_plan_of_each_task_is_what_its_step_takes(name, tokens):
    config, data = configured(name, tokens)
    size = config.batch_option[1]
    planned = Planner(config, data, "cpu").footprint(size)
    task = build_task(config, data)
    if name == "in double precision":
        task = task.double()
    check_plan(planned, training_step(config, task, example_batch(data, size), "cpu"))
    assert (planned.parts["average"] > 0) == (name == "with an average")
    assert (planned.parts["hologram"] > 0) == (name == "with a hologram")


def test_an_example_is_a_batch_such_as_the_data_give(tokens):
    for name in ("images", "causal_lm, muon", "sequence_classification"):
        config, data = configured(name, tokens)
        real, example = next(iter(data.train_dataloader())), example_batch(data, config.batch_option[1])
        pairs = [(real[key], example[key]) for key in real] if isinstance(real, dict) else list(zip(real, example, strict=True))
        for one, other in pairs:
            assert one.dtype == other.dtype and one.ndim == other.ndim
            assert one.numel() <= other.numel() or name == "sequence_classification"


def test_the_largest_batch_of_documents_is_what_is_planned(tokens):
    config, data = configured("masked_lm", tokens)
    largest = max(batch["tokens"].numel() for batch in data.train_dataloader())
    assert largest <= example_batch(data, config.batch_option[1])["tokens"].numel() < 2048 + data.longest


def test_what_must_fit_is_the_bound(tokens, monkeypatch):
    config, data = configured("images, mixed", tokens)
    config = replace(config.with_batch(16), model=replace(config.model, depth=1), backward=BackwardConfig("reversible"))

    def packs(answer):
        """Whether this CPU gives half precision products to oneDNN."""
        monkeypatch.setattr("holotrain.planning.scratch.goes_to_onednn", lambda dtype: answer and dtype in HALF)

    packs(False)
    plain = Planner(config, data, "cpu")
    budget = plain.footprint(16).bound
    assert largest_batch(plain, config.backward, budget, most=16) == 16
    packs(True)
    packed = Planner(config, data, "cpu")
    assert plain.footprint(16).peak == packed.footprint(16).peak and packed.footprint(16).bound > budget
    assert 0 < largest_batch(packed, config.backward, budget, most=16) < 16
    for planner, fits in ((plain, True), (packed, False)):
        footprint = planner.footprint(16)
        plan = Plan("cpu", budget, "reversible", config.backward, {"reversible": footprint}, None, [])
        assert plan.fits == fits
        figures = plan.as_json()["footprints"]["reversible"]
        assert figures["bound"] == footprint.bound == figures["peak"] + figures["scratch"]
    with pytest.raises(UserError, match="is too little"):
        settle(Planner(replace(config, backward=BackwardConfig("auto")), data, "cpu"), budget)
