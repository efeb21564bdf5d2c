"""What commands write, print and read again, logs among it; and the precision of products that they set."""

import csv
import json
import math
import time
import warnings
from types import SimpleNamespace

import pytest
import torch
from covering import slow
from tracked_memory import check_plan

from holotrain import compose
from holotrain.callbacks.measured import Measured
from holotrain.commands import plan as command
from holotrain.commands.plan import PLAN
from holotrain.commands.planner import planner_of
from holotrain.commands.sweep import best
from holotrain.config.build import build_data
from holotrain.data.loader import example_batch
from holotrain.errors import UserError
from holotrain.folders import write_table


def test_a_spreadsheet_runs_nothing_in_a_table_whose_other_cells_are_as_they_were(tmp_path):
    formulas = ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(1)", "\t=1", "\r\n=1", "\n=1"]
    cells = [-1.5, None, "-0.5", "+1e3", "a, b", 'say "x"', "1=1", "", "\u05d0!\u200f\r\n\xe9"]
    controls = ["\x1b[2Ja", "gpj.\u202ea", "\r=1"]
    write_table(tmp_path / "table.csv", ["one", "=two"], [formulas, cells, controls])
    written = ["'" + formula for formula in formulas], ["-1.5", "", *cells[2:]], ["\\x1b[2Ja", "gpj.\\u202ea", "\\r=1"]
    assert list(csv.reader((tmp_path / "table.csv").open(newline=""))) == [["one", "'=two"], *written]


@pytest.mark.parametrize(("mode", "worst"), [("max", -math.inf), ("min", math.inf)])
def test_a_sweeper_gets_the_score_and_the_worst_one_of_a_training_that_diverged(tmp_path, mode, worst):
    found = {"command": "fit", "status": "diverged", "overrides": [], "metrics": {}, "monitor": "val/loss", "mode": mode}
    for score, expected in ((0.5, 0.5), (None, worst)):
        (tmp_path / "summary.json").write_text(json.dumps(found | {"score": score}))
        assert best(tmp_path) == expected


TRAINER = SimpleNamespace(callbacks=[], callback_metrics={"val/loss": torch.tensor(0.5)})


@pytest.mark.parametrize("kept", [None, [], {"metrics": 3}, {"command": 1, "status": "completed", "step_seconds": "fast"}])
def test_what_is_no_measurement_is_left_out(kept):
    measured = Measured(time.monotonic(), resumed=True)
    measured.on_load_checkpoint(TRAINER, None, {"measured": kept})
    found = measured.figures(TRAINER)
    assert found.pop("seconds") < 100 and found == {"metrics": {"val/loss": 0.5}}


@pytest.mark.parametrize("resumed", [True, False])
def test_only_a_resumed_training_has_the_numbers_of_its_checkpoint(resumed):
    measured = Measured(time.monotonic(), resumed)
    held = {"metrics": {"train/loss": 2.0, "val/loss": 3.0, 4: 5.0}, "step_seconds": 0.1, "seconds": 1000.0}
    measured.on_load_checkpoint(TRAINER, None, {"measured": held})
    before = {"metrics": {"train/loss": 2.0, "val/loss": 0.5}, "step_seconds": 0.1}
    found = measured.figures(TRAINER)
    assert (found.pop("seconds") > 1000) is resumed  # the time of all parts
    assert found == (before if resumed else {"metrics": {"val/loss": 0.5}})


def test_a_loss_that_is_not_finite_is_named_once_and_forgotten_if_it_recovers():
    measured, trainer = Measured(0.0, resumed=False), SimpleNamespace(current_epoch=0, callback_metrics={})
    said = []
    for trainer.current_epoch, loss in enumerate([1.0, math.nan, math.nan, 2.0, math.inf]):
        trainer.callback_metrics["train/loss"] = torch.tensor(loss)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            measured.on_train_epoch_end(trainer, None)
        said.append((measured.diverged, len(caught)))
    nan, inf = "train/loss is nan since epoch 2", "train/loss is inf since epoch 5"
    assert said == [(None, 0), (nan, 1), (nan, 0), (None, 0), (inf, 1)]


def test_a_plan_that_does_not_say_whether_it_fits_is_refused(tmp_path):
    """What is null fits nowhere in particular: the memory is not known."""
    found = {"backward": "reversible", "fits": None, "peak_bytes": 5, "largest": {}}
    (tmp_path / PLAN).write_text(json.dumps(found))
    assert command.row(tmp_path)["fits"] == ""
    del found["fits"]
    (tmp_path / PLAN).write_text(json.dumps(found))
    with pytest.raises(UserError, match=f"{PLAN} is not a readable plan of a run: fits: a value is needed"):
        command.row(tmp_path)


SIZES = ["model.dim=96", "model.heads=3", "model.depth=2"]
TEXT = [*SIZES, "data.context=64"]
CASES = {
    "images, mixed": [*SIZES, "data.batch_size=128", "data.mixup_alpha=0.2", "trainer.precision=bf16-mixed"],
    "causal_lm, muon": ["task=causal_lm", *TEXT, "data.batch_size=16"],
    "masked_lm": ["task=masked_lm", *TEXT, "data.max_tokens=2048"],
    "sequence_classification": ["task=sequence_classification", *TEXT, "data.max_tokens=2048"],
    "in double precision": [*SIZES, "trainer.precision=64-true"],
    "with an average": [*SIZES, "callbacks=ema", "data.mixup_alpha=0"],
    "with a hologram": [*SIZES, "synthesis=associative"],
    "a head alone": [*SIZES, "model.trained=head", "model.patch_size=2"],
    "causal_lm, in tiles": ["task=causal_lm", *SIZES, "data.context=128", "data.batch_size=8", "backward.tile=48"],
    "causal_lm, in chunks": ["task=causal_lm", *SIZES, "data.context=128", "data.batch_size=8", "backward.chunk=48"],
    "gradients that add up": [*SIZES, "trainer.accumulate_grad_batches=4"],
    "a schedule a block": [*SIZES, "backward=auto", "backward.blocks=[reversible+attention,checkpoint]"],
}
SLOW = ("sequence_classification", "in double precision", "gradients that add up", "with an average", "masked_lm")


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
