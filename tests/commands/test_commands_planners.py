"""Plans of configured runs, task by task, against the same step on real tensors."""

import pytest
from covering import slow
from tracked_memory import check_plan

from holotrain import compose
from holotrain.commands.planners import planner_of
from holotrain.config.build import build_data
from holotrain.data.example import example_batch

SMALL = ["model.dim=96", "model.heads=3", "model.depth=2"]
TEXT = [*SMALL, "data.context=64"]
CASES = {
    "images, mixed": [*SMALL, "data.batch_size=128", "data.mixup_alpha=0.2", "trainer.precision=bf16-mixed"],
    "causal_lm, muon": ["task=causal_lm", *TEXT, "data.batch_size=16"],
    "masked_lm": ["task=masked_lm", *TEXT, "data.max_tokens=2048"],
    "sequence_classification": ["task=sequence_classification", *TEXT, "data.max_tokens=2048"],
    "in double precision": [*SMALL, "trainer.precision=64-true"],
    "with an average": [*SMALL, "callbacks=ema", "data.mixup_alpha=0"],
    "with a hologram": [*SMALL, "synthesis=associative"],
    "a head alone": [*SMALL, "model.trained=head", "model.patch_size=2"],
    "causal_lm, in tiles": ["task=causal_lm", *SMALL, "data.context=128", "data.batch_size=8", "backward.tile=48"],
    "gradients that add up": [*SMALL, "trainer.accumulate_grad_batches=4"],
    "a schedule a block": [*SMALL, "backward=auto", "backward.blocks=[reversible+attention,checkpoint]"],
}
SLOW = ("sequence_classification", "in double precision", "gradients that add up", "with an average", "adapters alone")


def configured(name, tokens):
    words = ["trainer.accelerator=cpu", *CASES[name]]
    if "lm" in name or "sequence" in name:
        words.append(f"data.cache_dir={tokens}")
    config = compose("fit", words)
    data = build_data(config)
    data.prepare_data()
    data.setup("fit")
    return config, data


@pytest.mark.parametrize("name", [slow(name) if name in SLOW else name for name in CASES])
def test_a_plan_of_each_task_is_what_its_step_takes(name, tokens):
    config, data = configured(name, tokens)
    planner = planner_of(config, data, "cpu")
    planned = planner.footprint(planner.backward)
    check_plan(planned, planner.make_step(planner.make_model(planner.backward, None), planner.batch.value))
    assert (planned.parts["average"] > 0) == (name == "with an average")
    assert (planned.parts["hologram"] > 0) == ("with a hologram" in name)


def test_an_example_is_a_batch_such_as_the_data_give(tokens):
    for name in ("with an average", "causal_lm, muon", "sequence_classification"):
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
