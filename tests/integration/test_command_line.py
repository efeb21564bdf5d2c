"""The command line as a user meets it: what it prints, what it leaves, how it fails."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from covering import long, slow
from forked import Forked
from left_by_runs import only, rows, scalars, summary, weights
from shown_runs import Logged
from small_run import SMALL

QUICK = [*SMALL, "test=false", "logger=none", "callbacks.progress=null"]

COMMON_KEYS = {
    "command", "status", "metrics", "steps", "samples_per_second", "peak_memory_bytes", "seconds", "checkpoint", "device",
    "precision", "backward", "synthesis",
}  # fmt: skip


def test_a_run_shows_and_leaves_what_it_should(holotrain):
    out = holotrain.done("fit", *SMALL)
    folder = only(Path("runs/fit"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", folder.name)
    for word in ("model", "rev_vit_tiny", "digits", "reversible", "32-true", "cpu", str(folder), "epoch 2/2", "test/accuracy"):
        assert word in out, word
    assert {path.name for path in folder.iterdir()} == {"checkpoints", "tensorboard", "config.yaml", "summary.json", "log.txt"}
    left = summary(folder)
    assert left.keys() >= COMMON_KEYS
    assert (left["status"], left["steps"], left["epochs"], left["synthesis"]) == ("completed", 6, 2, "none")
    assert left["samples_per_second"] > 0 and left["peak_memory_bytes"] > 2**20
    assert {"train/loss", "val/loss", "val/accuracy", "test/loss", "test/accuracy"} <= left["metrics"].keys()
    assert left["overrides"] == SMALL
    assert Path(left["checkpoint"]).is_file() and Path(left["checkpoint"]).name.startswith("best-")
    assert yaml.safe_load((folder / "config.yaml").read_text())["model"]["dim"] == 16
    assert "_target_: holotrain.models.RevViT" in Logged(folder).texts("configuration")[-1][1]
    seen = scalars(folder)
    assert len(seen["train/loss"]) == 6 and len(seen["val/accuracy"]) == 2
    for tag in ("memory/peak_MiB", "memory/current_MiB", "throughput/samples_per_second", "throughput/step_seconds"):
        assert tag in seen
    assert "hp_metric" not in seen and seen["test/accuracy"] == [pytest.approx(left["metrics"]["test/accuracy"])]


@pytest.fixture
def trained(image_run):
    """A finished run, and the best checkpoint in it."""
    return image_run, image_run / "checkpoints" / Path(summary(image_run)["checkpoint"]).name


def test_evaluation_needs_the_checkpoint_alone(holotrain, trained):
    folder, checkpoint = trained
    expected = summary(folder)["metrics"]
    out = holotrain.done("validate", f"ckpt_path={checkpoint}")
    left = summary(only(Path("runs/validate")))
    assert left["metrics"]["val/accuracy"] == pytest.approx(expected["val/accuracy"])
    assert left["checkpoint"] == str(checkpoint) and "val/accuracy" in out
    # overrides change what the checkpoint brings
    holotrain.done("test", f"ckpt_path={checkpoint}", "trainer.limit_test_batches=1.0", "output_dir=other")
    assert 0 < summary(only(Path("other/test")))["metrics"]["test/loss"] != expected["test/loss"]


def test_predictions_of_the_test_part_and_of_files(holotrain, trained):
    from PIL import Image

    predict = ["predict", f"ckpt_path={trained[1]}"]
    out = holotrain.done(*predict, "data.batch_size=100", "probabilities=true", "hydra.run.dir=test_part")
    assert re.search(r"predictions +test_part/predictions.csv", out)
    found = rows(Path("test_part/predictions.csv"))
    assert len(found) == 359 and found[3]["image"] == "3"
    assert all(row["class"] in set("0123456789") and 0.1 <= float(row["probability"]) <= 1 for row in found)
    assert all(sum(float(row[f"p({name})"]) for name in range(10)) == pytest.approx(1, abs=1e-5) for row in found)
    assert all(row["probability"] == row[f"p({row['class']})"] for row in found)
    Path("mine").mkdir()
    for name in ("a.png", "b.jpg"):
        Image.new("RGB", (30, 50), "white").save(Path("mine") / name)
    Path("mine/c.jpg").write_bytes(b"broken")
    with pytest.warns(UserWarning, match=r"left out: mine/c.jpg is not a readable image"):
        status, out, _ = holotrain(*predict, "images=mine", "hydra.run.dir=files")
    assert status == 0 and re.search(r"unreadable +1 ", out)
    files = rows(Path("files/predictions.csv"))
    assert [row["image"] for row in files] == ["mine/a.png", "mine/b.jpg"] and "p(0)" not in files[0]
    assert "images" in holotrain.refused(*predict, "images=mine/c.jpg")


@pytest.mark.slow
def test_average_weights_are_what_is_tested_and_saved(holotrain):
    words = ["callbacks=ema", "callbacks.ema.decay=0.5", "trainer.limit_test_batches=1.0", "test=true"]
    holotrain.done("fit", *QUICK, *words)
    left = summary(only(Path("runs/fit")))
    holotrain.done("test", f"ckpt_path={left['checkpoint']}")
    assert summary(only(Path("runs/test")))["metrics"]["test/loss"] == pytest.approx(left["metrics"]["test/loss"])
    checkpoint = torch.load(left["checkpoint"], weights_only=True)
    pairs = zip(checkpoint["state_dict"].values(), checkpoint["current_model_state"].values(), strict=True)
    assert any(not torch.equal(average, current) for average, current in pairs)


@pytest.mark.slow
def test_a_sweep_ends_with_its_table(holotrain):
    words = ["optimizer.lr=1e-3,1e-4", "data=digits", "model=rev_vit_tiny", *SMALL, "trainer.max_epochs=1"]
    out = holotrain.done("fit", *words[:1], "-m", *words[1:])
    sweep = only(Path("runs/fit/sweeps"))
    table = rows(sweep / "sweep.csv")
    jobs = [(row["job"], row["status"], float(row["optimizer.lr"])) for row in table]
    assert jobs == [("0", "completed", 1e-3), ("1", "completed", 1e-4)]
    assert all(float(row["test/accuracy"]) >= 0 and float(row["samples_per_second"]) > 0 for row in table)
    assert all(int(row["peak_memory_bytes"]) > 0 for row in table)
    assert "sweep of 2 jobs" in out and str(sweep / "sweep.csv") in out.replace("\n", "")
    values = [float(row["best/val/accuracy"]) for row in table]
    assert f"best job: {values.index(max(values))}, val/accuracy" in out
    options, results = Logged(sweep / "0").columns()  # TensorBoard compares what varies, and shows the first five results
    assert options == ["optimizer.lr"]
    assert results[:5] == ["val/accuracy", "val/loss", "memory/step_peak_MiB", "memory/peak_MiB", "seconds"]


@pytest.mark.slow
def test_a_resumed_sweep_with_other_values_finds_its_jobs_by_them(holotrain):
    words = ["-m", "data=digits", "model=rev_vit_tiny", "trainer.max_steps=1", "trainer.limit_val_batches=1", "test=false"]
    words.append("hydra.sweep.dir=sweep")
    holotrain.done("fit", "optimizer.lr=1e-3,1e-4", *words)
    before = Path("sweep/0/summary.json").read_bytes()
    os.utime("sweep/1/job.json", (0, 0))  # not of a second ago, which may be of this sweep by another machine's clock
    holotrain.done("fit", "optimizer.lr=5e-2,1e-3", "resume=true", *words)
    found = {row["optimizer.lr"]: row["val/loss"] for row in rows(Path("sweep/sweep.csv"))}
    assert {*found} == {"0.05", "0.001"} and len({*found.values()}) == 2
    assert float(found["0.001"]) == json.loads(before)["metrics"]["val/loss"]
    assert Path("sweep/0/summary.json").read_bytes() == before
    holotrain.done("fit", "optimizer.lr=1e-3,1e-4", "resume=true", *words, "trainer.max_steps=2")  # train on
    assert sorted(path.name for path in Path("sweep").glob("[0-9]")) == ["0", "1", "2"]
    assert json.loads(Path("sweep/0/summary.json").read_text())["steps"] == 2


def test_a_default_batch_that_leaves_out_much_of_an_epoch_is_made_smaller(holotrain):
    words = ["fit", "data=fake", "data.train_size=28", *QUICK, "trainer.max_steps=1"]
    with pytest.warns(UserWarning, match="data.batch_size: 14 in place of the default, 16, which leaves 12 of 28"):
        assert "batches of 14" in holotrain.done(*words)
    assert "28 to train (12 left out of each epoch)" in holotrain.done(*words, "data.batch_size=16")


@pytest.mark.slow
def test_a_task_that_a_checkpoint_has_may_be_named_again(holotrain, trained):
    words = ["task=image_classification", "data=digits", "trainer.limit_test_batches=1"]
    holotrain.done("test", f"ckpt_path={trained[1]}", *words)


@pytest.mark.slow
def test_what_has_changed_since_the_checkpoint_is_applied_and_told(holotrain, trained):
    words = ["resume=true", "trainer.max_epochs=3", "optimizer.lr=1e-7", "data.val_fraction=0.3", "test=false"]
    shutil.copytree(trained[0], "run")
    with pytest.warns(UserWarning, match="samples of train .* held out"):
        status, out, _ = holotrain("fit", *words, "hydra.run.dir=run")
    assert status == 0 and re.search(r"optimizer.lr \S+ -> 1e-07", " ".join(out.split()))
    (group, *_) = torch.load("run/checkpoints/last.ckpt", weights_only=True)["optimizer_states"][0]["param_groups"]
    assert group["initial_lr"] == 1e-7
    status, _, err = holotrain("fit", "resume=true", "trainer.max_epochs=4", "seed=9", "hydra.run.dir=run")
    assert status == 2 and err.startswith("holotrain: seed=9:") and err.count("\n") == 1


def test_the_latest_checkpoints_are_kept_and_the_folder_of_a_run_is_trained_on(holotrain, trained):
    words = ["steps._target_=holotrain.checkpoints.saving.ExactCheckpoint", "steps.monitor=step", "steps.mode=max"]
    words += ["steps.save_top_k=2", "steps.every_n_train_steps=1"]
    kept = [*QUICK, f"model.pretrained={trained[0]}", "hydra.run.dir=run", *(f"callbacks.{word}" for word in words)]
    status, _, err = holotrain("fit", *kept)
    assert status == 0 and "tensors of a holotrain model" in err
    assert yaml.safe_load(Path("run/config.yaml").read_text())["model"]["pretrained"] == str(trained[1])
    assert sorted(path.name for path in Path("run/checkpoints").glob("epoch*")) == [
        "epoch=1-step=5.ckpt",
        "epoch=1-step=6.ckpt",
    ]


@pytest.mark.slow
def test_a_swept_value_may_follow_another(holotrain):
    holotrain.done("fit", "-m", *QUICK, "optimizer=adamw", "optimizer.lr=1e-3,1e-4", "optimizer.weight_decay=${optimizer.lr}")
    configs = [yaml.safe_load(path.read_text()) for path in Path("runs/fit/sweeps").glob("*/*/config.yaml")]
    assert sorted(config["optimizer"]["weight_decay"] for config in configs) == [1e-4, 1e-3]


def test_a_part_is_frozen_and_a_training_that_its_time_has_ended_says_so(holotrain):
    words = [*QUICK, "model.freeze=[embedding.*]", "trainer.max_epochs=999", "trainer.max_time=00:00:00:01"]
    out = " ".join(holotrain.done("fit", *words).split())
    assert " trainable" in out and " max_time 0:00:01 " in out
    assert "max_epochs=-1: a schedule must know" in holotrain.refused("fit", *words, "trainer.max_epochs=-1")
    assert holotrain.refused("fit", *words, "model.freeze=['*']").startswith("holotrain: model.freeze: nothing is left")


@pytest.mark.slow
def test_layers_learn_more_slowly_the_deeper_they_are_and_a_resumed_training_takes_another_share(holotrain):
    words = [*QUICK, "optimizer=adamw", "optimizer.lr=1e-3", "scheduler=constant", "hydra.run.dir=run"]
    shown = holotrain.done("fit", *words, "trainer.max_epochs=1", "optimizer.layer_decay=0.5", "data.mixup_alpha=0.2")
    assert re.search(r"data +\w+, \d+ x \d+ pixels, \d+ classes, batches of", shown)
    assert "lr 0.001, layer_decay 0.5" in shown and re.search(r"augment +mixup_alpha 0.2 *\n", shown)
    holotrain.done("fit", "resume=true", "hydra.run.dir=run", "trainer.max_epochs=2", "optimizer.layer_decay=0.1")
    groups = torch.load("run/checkpoints/last.ckpt", weights_only=True)["optimizer_states"][0]["param_groups"]
    assert sorted({group["lr"] for group in groups}) == pytest.approx([1e-6, 1e-5, 1e-4, 1e-3])  # head, two blocks, embedding
    for share, expected in (("1.5", "optimizer.layer_decay: "), ("1", "another training: .* parameter groups")):
        status, _, err = holotrain(
            "fit", "resume=true", "hydra.run.dir=run", "trainer.max_epochs=3", f"optimizer.layer_decay={share}"
        )
        assert status == 2 and re.search(expected, err) and err.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "words", "expected"),
    [
        ("fit", ["model.dim=32"], "another model"),
        ("test", ["data=fake", "data.num_classes=3"], "was trained on other classes"),
        slow("fit", ["optimizer=adamw"], "optimizer"),
        slow("fit", ["synthesis.exclude=['*norm*']", "trainer.max_epochs=3"], "another synthesis: parameters is"),
    ],
)
def test_checkpoints_that_do_not_fit_are_refused(holotrain, trained, command, words, expected):
    before = trained[1].read_bytes()
    status, _, err = holotrain(command, f"ckpt_path={trained[1]}", *words)
    assert status == 2 and expected in err and err.count("\n") <= 3 and "Traceback" not in err
    assert trained[1].read_bytes() == before


STARVED = """
import ctypes, resource, sys
M_MMAP_THRESHOLD = -3
from holotrain.checkpoints.exact_resume import ExactResume
def starve(self, trainer, module, outputs, batch, index):
    if trainer.global_step == 4:
        in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**22, -1))
ExactResume.on_train_batch_end = starve
# What is freed goes back to the system at once: else a step may find room in what the one before had.
ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)
from holotrain.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on memory and glibc")
def test_out_of_memory_keeps_the_checkpoint_and_says_what_needs_less(holotrain, tmp_path):
    words = ["model.patch_size=2", "model.depth=2", "model.dim=96", "data.batch_size=256", *QUICK[3:], "backward=autograd"]
    run = Forked(STARVED, "fit", *words, folder=tmp_path, errors=tmp_path / "errors")
    status, err = run.wait(), Path("errors").read_text()
    folder = only(Path("runs/fit"))
    assert status == 2 and "Traceback" not in err, err
    said, resume, less = err.strip().splitlines()
    assert re.match(r"holotrain: out of memory at step 5 with data.batch_size=256 on cpu.*: tried to allocate [\d.]+ MiB", said)
    assert f"resume=true hydra.run.dir={folder}" in resume and "backward=reversible" in less
    left = summary(folder)
    assert (left["status"], left["steps"]) == ("out of memory", 4) and "val/loss" in left["metrics"]
    holotrain.done("fit", "resume=true", f"hydra.run.dir={folder}", "backward=reversible")
    assert summary(folder)["steps"] == 6


@pytest.mark.parametrize(("depth", "epochs", "accuracy"), [long(1, 10, 0.97), long(17, 40, 0.95)])
def test_error_diffusion_learns_ten_digits(holotrain, depth, epochs, accuracy):
    holotrain.done(
        "fit", "task=error_diffusion", "trainer.accelerator=cpu", f"model.depth={depth}", f"trainer.max_epochs={epochs}"
    )
    folder = only(Path("runs/fit"))
    assert summary(folder)["metrics"]["test/accuracy"] >= accuracy
    assert all((tensor >= 0).all() for name, tensor in weights(folder / "checkpoints/last.ckpt").items() if "model." in name)
    found = scalars(folder)
    assert set(found["error_diffusion/sign_violations"]) == {0.0}
    assert all(-1 <= value <= 1 for value in found["error_diffusion/alignment"])
    assert len(found["error_diffusion/dead_cells"]) == len(found["error_diffusion/alignment"]) == 40 * epochs // 20
