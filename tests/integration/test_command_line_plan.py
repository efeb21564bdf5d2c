"""Planning as a user meets it: ``plan``, ``backward=auto``, a batch chosen by the plan."""

import json
import re
from pathlib import Path

import pytest
import yaml
from left_by_runs import only, summary
from small_run import SMALL

from holotrain import compose
from holotrain.commands.planner import planner_of
from holotrain.config.build import build_data
from holotrain.planning.choice import flops
from holotrain.planning.tracker import Footprint
from holotrain.schedules import OF_REVERSIBLE

FAKE = ["data=fake", "data.image_size=16", "data.train_size=128", "data.val_size=64", "data.test_size=64"]
SIZES = ["model.patch_size=2", "model.dim=24", "model.depth=4", "model.heads=2"]
PLANNED = [*FAKE, "data.batch_size=64", *SIZES, "trainer.accelerator=cpu"]
"""Takes 28 MiB under autograd, 12 MiB under checkpoint and pareprop, 8.5 MiB under reversible."""

RUN = [*PLANNED, "trainer.max_epochs=2", "test=false", "logger=none"]


def kept(folder: str | Path) -> dict:
    return yaml.safe_load(Path(folder, "config.yaml").read_text())


def footprint(*words: str) -> Footprint:
    """Of one step alone: no other backward is tried, and no size is searched for."""
    config = compose("plan", words)
    data = build_data(config)
    data.prepare_data()
    data.setup("fit")
    planner = planner_of(config, data, "cpu")
    return planner.footprint(planner.backward)


def test_a_plan_shows_every_backward(holotrain):
    out = holotrain.done("plan", *SMALL, "memory=64MiB", "json=figures.json")
    folder = only(Path("runs/plan"))
    assert {path.name for path in folder.iterdir()} == {"plan.json"}
    for word in {"rev_vit_tiny", "64 MiB", "data.batch_size=", "model.depth=", *OF_REVERSIBLE}:
        assert word in out, word
    figures = json.loads(Path("figures.json").read_text())
    assert figures == json.loads((folder / "plan.json").read_text())
    peaks = {name: found["peak"] for name, found in figures["footprints"].items()}
    assert peaks["reversible"] < peaks["checkpoint"] < peaks["autograd"]
    assert figures["fits"] and figures["remedies"] == []


@pytest.mark.slow
def test_auto_keeps_within_its_budget_and_a_resumed_run_keeps_its_choice(holotrain, monkeypatch):
    # By FLOPs: times of a busy machine may well make one schedule the best for every block.
    monkeypatch.setattr("holotrain.planning.memory_plan.seconds", lambda visit, names, autocast: flops(visit, names))
    words = [*RUN, "backward=auto", "memory=15MiB", "callbacks.checkpoint.every_n_train_steps=1"]
    out = holotrain.done("fit", *words, "trainer.max_steps=3", "hydra.run.dir=cut")
    blocks = kept("cut")["backward"]["blocks"]
    assert len(blocks) == 4 and len(set(blocks)) > 1
    assert re.search(r"\d (autograd|checkpoint|reversible)\S*; [\d.]+ MiB of 15 MiB", out)
    chosen = footprint(*PLANNED, "backward=auto", f"backward.blocks=[{','.join(blocks)}]").peak
    assert footprint(*PLANNED, "backward=reversible").peak < chosen <= 15 * 2**20

    more = ["ckpt_path=cut/checkpoints/last.ckpt", "trainer.max_steps=-1", "memory=1GiB", "hydra.run.dir=on"]
    assert "planning" not in holotrain.done("fit", *more)
    assert kept("on")["backward"]["blocks"] == blocks


@pytest.mark.slow
def test_the_largest_batch_is_chosen_and_written_down(holotrain):
    out = holotrain.done("fit", *RUN, "data.batch_size=auto", "memory=4MiB", "hydra.run.dir=run")
    size = kept("run")["data"]["batch_size"]
    assert 1 < size < 128 and f"data.batch_size={size} is the largest that fits into 4 MiB" in out
    assert summary(Path("run"))["steps"] == 2 * (128 // size)


@pytest.mark.long
def test_a_model_of_transformers_is_trained_within_the_least_memory(holotrain):
    """auto finds what needs least of a small GPT-2 on long texts: all blocks are checkpointed, and their MLPs in tiles."""
    sizes = {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 260, "n_positions": 2048}
    sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    Path("gpt2").mkdir()
    Path("gpt2/config.json").write_text(json.dumps({"model_type": "gpt2"} | sizes))
    Path("text.txt").write_text("".join(f"a few words of line {number}\n" for number in range(8000)))
    model = ["task=causal_lm", "model=huggingface", "model.name=gpt2/config.json", "optimizer=adamw", "trainer.accelerator=cpu"]
    data = ["data=text_files", "data.files=text.txt", "data.unit=line", "data.batch_size=1", "data.context=2048"]
    data += ["data.val_fraction=0.1", "data.test_fraction=0.1", "logger=none", "trainer.max_steps=2", "test=false"]
    fit = ["fit", *model, *data, "backward=auto"]
    _, _, err = holotrain(*fit, "memory=12MiB")
    least = int(float(re.search(r"this run needs ([\d.]+) MiB", err)[1]) + 1)
    assert holotrain.done(*fit, f"memory={least}MiB", "hydra.run.dir=run")
    backward = kept("run")["backward"]
    assert backward["tile"] == 512 and set(backward["blocks"]) == {"checkpoint"}
    left = summary(Path("run"))
    assert left["step_peak_bytes"] <= least * 2**20 and left["planned_step_bytes"] <= least * 2**20
    assert 1.1 * left["step_peak_bytes"] == pytest.approx(left["planned_step_bytes"], rel=1e-3)  # with a tenth of scratch

    less = [*fit, f"memory={least - 1}MiB", "backward.inexact=true", "hydra.run.dir=less"]
    assert holotrain.done(*less)
    assert "checkpoint8" in kept("less")["backward"]["blocks"]
    assert summary(Path("less"))["step_peak_bytes"] <= (least - 1) * 2**20
