"""Planning as a user meets it: ``plan``, ``backward=auto``, a batch chosen by the plan."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
import yaml
from left_by_runs import only, summary, weights
from small_run import SMALL

from holotrain.planning import flops

FAKE = ["data=fake", "data.image_size=32", "data.batch_size=64", "data.train_size=128", "data.val_size=64", "data.test_size=64"]
RUN = [*FAKE, "model.dim=48", "model.depth=8", "trainer.accelerator=cpu", "trainer.max_epochs=2", "test=false"]

PLANNED = RUN[:-2]


def plan_of(holotrain, *words):
    status, out, err = holotrain("plan", *words, "json=-")
    assert (status, err) == (0, "")
    return json.loads(out)


def test_a_plan_shows_every_backward_and_leaves_a_picture(holotrain):
    status, out, err = holotrain("plan", *SMALL, "memory=64MiB", "json=figures.json")
    assert (status, err) == (0, "")
    folder = only(Path("runs/plan"))
    assert {path.name for path in folder.iterdir()} == {"plan.json", "plan.svg"}
    for word in (
        "rev_vit_tiny",
        "64 MiB",
        "autograd",
        "checkpoint",
        "reversible",
        "pareprop",
        "data.batch_size=",
        "model.depth=",
    ):
        assert word in out, word
    figures = json.loads(Path("figures.json").read_text())
    assert figures == json.loads((folder / "plan.json").read_text())
    peaks = {name: found["peak"] for name, found in figures["footprints"].items()}
    assert peaks["reversible"] < peaks["checkpoint"] < peaks["autograd"]
    assert figures["fits"] and figures["remedies"] == []
    picture = ElementTree.parse(folder / "plan.svg").getroot()
    words = {text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")}
    assert {"autograd", "reversible", "memory: 64 MiB"} <= words


def test_what_it_promises_to_fit_does_and_one_more_does_not(holotrain):
    budget = 24 * 2**20
    largest = plan_of(holotrain, *PLANNED, f"memory={budget}")["largest"]
    for option, value in largest.items():
        peaks = [
            plan_of(holotrain, *PLANNED, f"{option}={value + more}", f"output_dir=more{more}")["footprints"]["reversible"][
                "bound"
            ]
            for more in (0, 1)
        ]
        assert peaks[0] <= budget < peaks[1]


def test_what_does_not_fit_is_told_what_would(holotrain):
    figures = plan_of(holotrain, *PLANNED, "memory=26MiB", "backward=autograd")
    assert figures["fits"] is False
    assert "backward=reversible" in figures["remedies"]
    assert any(word.startswith("data.batch_size=") for word in figures["remedies"])
    for remedy in figures["remedies"]:
        words = ["backward=autograd", *remedy.split()] if "batch" in remedy else remedy.split()
        assert plan_of(holotrain, *PLANNED, "memory=26MiB", *words)["fits"], remedy


def test_a_remedy_undoes_what_another_backward_cannot_keep(holotrain):
    asked = [*PLANNED, "backward=reversible", "backward.store=8", "memory=36MiB"]
    (remedy,) = (remedy for remedy in plan_of(holotrain, *asked)["remedies"] if remedy.startswith("backward=checkpoint"))
    assert remedy == "backward=checkpoint backward.store=0"
    assert plan_of(holotrain, *asked, *remedy.split())["fits"]


def test_auto_that_cannot_fit_is_shown_all_the_same(holotrain):
    figures = plan_of(holotrain, *PLANNED, "memory=10MiB", "backward=auto")
    assert (figures["fits"], figures["backward"], figures["blocks"]) == (False, "reversible", None)
    assert [word for word in figures["remedies"] if word.startswith("data.batch_size=")]


def test_attention_with_dropout_is_planned_for_a_gpu_too(holotrain):
    peaks = [
        {name: found["peak"] for name, found in plan_of(holotrain, *PLANNED[:-1], "device=cuda", dropout)["footprints"].items()}
        for dropout in ("model.attention_dropout=0", "model.attention_dropout=0.1")
    ]
    assert peaks[0] == peaks[1]


def test_plain_models_have_two_ways(holotrain):
    figures = plan_of(holotrain, "model=swin_nano", *FAKE, "device=cuda")
    assert list(figures["footprints"]) == ["autograd", "checkpoint"] and figures["budget_bytes"] is None


def test_auto_keeps_within_its_budget_and_a_resumed_run_keeps_its_choice(holotrain, monkeypatch):
    # By FLOPs: times of a busy machine may well make one schedule the best for every block.
    monkeypatch.setattr("holotrain.config.choose_backward.seconds", lambda visit, names, autocast: flops(visit, names))
    words = [*RUN, "backward=auto", "memory=26MiB", "callbacks.checkpoint.every_n_train_steps=1"]
    status, out, err = holotrain("fit", *words, "output_dir=whole")
    assert (status, err) == (0, "")
    folder = only(Path("whole/fit"))
    blocks = yaml.safe_load((folder / "config.yaml").read_text())["backward"]["blocks"]
    assert len(blocks) == 8 and len(set(blocks)) > 1
    assert re.search(r"\d (autograd|checkpoint|reversible)\S*; [\d.]+ MiB of 26 MiB", out)
    figures = plan_of(holotrain, *PLANNED, "backward=auto", f"backward.blocks=[{','.join(blocks)}]", "memory=26MiB")
    assert figures["fits"] and figures["footprints"]["auto"]["peak"] > figures["footprints"]["reversible"]["peak"]

    status, _, _ = holotrain("fit", *words, "trainer.max_steps=3", "output_dir=cut")
    assert status == 0
    cut = only(Path("cut/fit"))
    status, out, err = holotrain(
        "fit", f"ckpt_path={cut}/checkpoints/last.ckpt", "trainer.max_steps=-1", "output_dir=on", "memory=1GiB"
    )
    assert (status, err) == (0, ""), err
    assert "planning" not in out
    assert (
        yaml.safe_load((only(Path("on/fit")) / "config.yaml").read_text())["backward"]["blocks"]
        == yaml.safe_load((cut / "config.yaml").read_text())["backward"]["blocks"]
    )


def test_auto_trains_as_reversible_does(holotrain):
    for name, words in {"auto": ["backward=auto", "memory=52MiB"], "reversible": ["backward=reversible"]}.items():
        assert holotrain("fit", *RUN, *words, "trainer.precision=64-true", f"output_dir={name}")[0] == 0
    auto, reversible = (weights(only(Path(name) / "fit") / "checkpoints/last.ckpt") for name in ("auto", "reversible"))
    assert all(torch.allclose(auto[name], reversible[name], atol=1e-9) for name in reversible)


def test_the_largest_batch_is_chosen_and_written_down(holotrain):
    status, out, err = holotrain("fit", *RUN, "data.batch_size=auto", "memory=10MiB")
    assert (status, err) == (0, "")
    folder = only(Path("runs/fit"))
    size = yaml.safe_load((folder / "config.yaml").read_text())["data"]["batch_size"]
    assert 1 < size < 128 and f"data.batch_size={size} is the most that 10 MiB" in out
    assert summary(folder)["steps"] == 2 * (128 // size)


def test_the_least_that_is_named_is_enough(holotrain):
    _, _, err = holotrain("fit", *RUN, "backward=auto", "memory=1MiB")
    least = re.search(r"needs ([\d.]+) MiB", err)[1]
    assert holotrain("fit", *RUN, "backward=auto", f"memory={least}MiB", "trainer.max_epochs=1")[0] == 0


def test_a_resumed_sweep_keeps_what_was_chosen(holotrain):
    words = [*RUN, "data.batch_size=auto", "memory=10MiB", "trainer.max_steps=2", "output_dir=sweep"]
    assert holotrain("fit", *words, "seed=1", "-m")[0] == 0
    (sweep,) = Path("sweep/fit/sweeps").iterdir()
    chosen = yaml.safe_load((sweep / "0/config.yaml").read_text())["data"]["batch_size"]
    words[-3:-1] = ["memory=12MiB", "trainer.max_steps=4"]
    status, out, _ = holotrain("fit", *words, "seed=1", "-m", "resume=true")
    assert status == 0 and "planning" not in out
    assert yaml.safe_load((sweep / "0/config.yaml").read_text())["data"]["batch_size"] == chosen


def test_no_more_is_taken_than_there_is(holotrain):
    assert holotrain("fit", *RUN, "data.batch_size=auto", "memory=10GiB")[0] == 0
    assert yaml.safe_load((only(Path("runs/fit")) / "config.yaml").read_text())["data"]["batch_size"] == 128


def test_several_devices_are_predicted_and_what_is_assumed_is_said(holotrain):
    status, out, err = holotrain("plan", *SMALL, "devices=2", "link=pcie", "json=figures.json")
    assert (status, err) == (0, "")
    said = " ".join(out.split())
    for words in (
        "on paper, 2 devices over pcie: predictions",
        "measured on the CPU",
        "44.8 GB/s",
        "20 us",
        "buckets of 25 MiB",
    ):
        assert words in said, words
    assert "4 all-reduces in a forward and 8 in its backward" in said  # two blocks, which recompute
    found = json.loads(Path("figures.json").read_text())
    assert found == json.loads((only(Path("runs/plan")) / "plan.json").read_text())
    scaling = found["scaling"]
    assert (scaling["devices"], scaling["link"]) == (2, "pcie")
    strategies = {one["strategy"]: one for one in scaling["strategies"]}
    assert list(strategies) == ["DDP", "FSDP2", "TP", "TP, overlapped"]
    for name, one in strategies.items():
        assert one["memory"] > 0 and 0 < one["seconds"]["low"] <= one["seconds"]["high"], name
        assert 0 < one["efficiency"]["low"] <= one["efficiency"]["high"] <= 1, name
        assert name in said and f"{1e3 * one['seconds']['low']:.4g}" in out
    assert strategies["TP"]["memory"] < strategies["FSDP2"]["memory"] < strategies["DDP"]["memory"]
    assert strategies["TP, overlapped"]["seconds"]["low"] <= strategies["TP"]["seconds"]["low"]
    single = scaling["single_device"]["seconds"]
    assert single["low"] <= strategies["DDP"]["seconds"]["low"]


def test_layers_that_cannot_be_shared_out_say_why(holotrain):
    figures = plan_of(holotrain, *SMALL, "devices=7", "device=cuda", "gpu=H100 PCIe")
    tensor_parallel = figures["scaling"]["strategies"][2:]
    said = "nothing can be shared out: 2 heads (not divisible by 7); MLPs of width 64 (not divisible by 7)"
    assert [one["reason"] for one in tensor_parallel] == [said] * 2
    assert [one["seconds"] for one in tensor_parallel] == [None] * 2
    assert "H100 PCIe" in figures["scaling"]["single_device"]["source"]
    status, out, _ = holotrain("plan", *SMALL, "devices=7", "device=cuda", "gpu=H100 PCIe", "output_dir=again")
    assert status == 0 and f"not possible: TP; TP, overlapped: {said}" in " ".join(out.split())
    status, out, _ = holotrain("plan", *SMALL, "devices=8", "device=cuda", "gpu=H100 PCIe", "output_dir=heads")
    assert status == 0 and "every rank computes whole: 2 heads (not divisible by 8)" in " ".join(out.split())


def test_without_devices_nothing_is_said_of_several(holotrain):
    figures = plan_of(holotrain, *SMALL)
    assert "scaling" not in figures


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["fit", "backward=auto", "memory=2MiB"],
            "memory: 2 MiB is too little: with data.batch_size=64 this run needs ",
        ),
        (
            ["fit", "data.batch_size=auto", "memory=100KiB"],
            "memory: 100 KiB is too little: with data.batch_size=1 this run needs 5.",
        ),
        (["fit", "data.batch_size=auto", "backward=auto"], "backward=auto wants the same memory"),
        (["fit", "backward=auto", "backward.store=2"], "backward=auto: it decides what is stored"),
        (["fit", "backward=auto", "backward.blocks=[autograd]"], "backward.blocks: there are 1 schedules for 8 blocks"),
        (
            ["fit", "backward=auto", "backward.blocks=[x,x,x,x,x,x,x,x]"],
            "backward.blocks: 'x' is not one of autograd, checkpoint",
        ),
        (["fit", "backward.blocks=[autograd]"], "backward.blocks: schedules block by block go with backward=auto"),
        (
            ["fit", "backward=auto", "backward.blocks=[pareprop+attention]", "compile=true"],
            "nothing can be kept within compiled",
        ),
        (["plan", "trainer.precision=16-mixed", "device=cpu"], "trainer.precision=16-mixed: a CPU cannot train so"),
        (["plan", "memory=lots"], "memory: 'lots' is no amount of memory; write 16GiB"),
        (["plan", "memory=0"], "memory: '0' is no amount of memory"),
        (["plan", "device=tpu"], "device: 'tpu' is not one of auto, cuda, cpu"),
        (["plan", "data.batch_size=many"], "data.batch_size: 'many' is neither a whole number nor auto"),
        (["plan", "backward=auto", "device=cuda"], "memory: how much has the GPU?"),
        (["plan", "devices=0"], "devices: 0 is out of range; it must be at least 1"),
        (["plan", "devices=2", "link=nvlnk"], "Did you mean 'nvlink'?"),
        (["plan", "link=pcie"], "link: it lies between several devices; give devices=8 too"),
        (["plan", "gpu=H100"], "gpu: it is for the times of several devices"),
        (["plan", "devices=2", "gpu=H10", "device=cuda"], "Did you mean 'H100'?"),
        (["plan", "devices=2", "gpu=H100", "device=cpu"], "device: 'cpu' is not one of cuda"),
    ],
)
def test_mistakes_are_answered_in_a_line(holotrain, words, said):
    command, *rest = words
    status, _, err = holotrain(command, *(PLANNED if command == "plan" else RUN), *rest)
    assert status == 2 and len(err.strip().splitlines()) == 1, err
    assert said in err


def test_a_model_that_cannot_be_planned_is_told_so(holotrain, monkeypatch):
    from holotrain.models.vit import RevViT

    ordinary = RevViT.forward
    monkeypatch.setattr(RevViT, "forward", lambda self, images: ordinary(self, images) * images.sum().item())
    for command, words in (("plan", PLANNED), ("fit", RUN)):
        status, _, err = holotrain(command, *words, "backward=auto", "memory=1GiB")
        assert status == 2 and len(err.strip().splitlines()) == 1 and "_local_scalar_dense.default asks for the value" in err
