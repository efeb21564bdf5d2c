"""The command line as a user meets it: what it prints, what it leaves, how it fails."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import yaml
from covering import long, slow
from data_files import write_folder
from forked import Forked
from left_by_runs import assert_same_weights, only, rows, scalars, summary, weights
from shown_runs import Logged
from small_run import SMALL

from holotrain.data.loader import worker_count
from holotrain.schedules import OF_REVERSIBLE

ROOT = Path(__file__).parents[2]
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
    for tag in ("memory/peak_bytes", "memory/current_bytes", "throughput/samples_per_second", "throughput/step_seconds"):
        assert tag in seen
    assert "hp_metric" not in seen and seen["test/accuracy"] == [pytest.approx(left["metrics"]["test/accuracy"])]


def test_the_last_screen_names_the_most_expensive_operators(holotrain):
    status, out, _ = holotrain("fit", *QUICK, "profiler=trace", "trainer.max_epochs=1", "trainer.limit_train_batches=3")
    folder = only(Path("runs/fit"))
    assert status == 0
    assert re.search(r"most expensive +\S+: [\d.]+%, [\d.]+ ms in \d+ calls?", out)
    assert len(re.findall(r"%, [\d.]+ ms in", out)) == 5
    assert {"trace-operators.txt", "trace.json.gz"} <= {path.name for path in folder.iterdir()}


def test_the_same_losses_from_every_schedule(holotrain):
    """With dropout, drop-path and MixUp on, through two epochs or more."""
    losses = {}
    for backward in OF_REVERSIBLE:
        holotrain.done(
            "fit", *SMALL, "test=false", "logger=csv", "callbacks.progress=null", f"backward={backward}",
            "trainer.precision=64-true", "model.dropout=0.1", "model.drop_path=0.1", "data.mixup_alpha=0.2",
            f"hydra.run.dir={backward}", "trainer.limit_train_batches=4",
        )  # fmt: skip
        logged = rows(Path(backward) / "csv/version_0/metrics.csv")
        losses[backward] = [float(row["train/loss"]) for row in logged if row["train/loss"]]
    assert len(losses["autograd"]) == 8
    for backward, found in losses.items():
        assert found == pytest.approx(losses["autograd"], rel=1e-9), backward


def test_a_training_that_was_stopped_early_is_complete_until_its_patience_is_raised(holotrain):
    still = ["optimizer.lr=1e-12", "callbacks=early_stopping", "callbacks.early_stopping.patience=1", "trainer.max_epochs=5"]
    holotrain.done("fit", *QUICK, *still, "hydra.run.dir=run")
    assert summary(Path("run"))["epochs"] == 2 and summary(Path("run"))["early_stopping_patience"] == 1
    again = ["fit", "resume=true", "hydra.run.dir=run", "logger=none"]
    said = " ".join(holotrain.done(*again).split())
    assert "stopped early after 2 epochs; to train on, raise callbacks.early_stopping.patience" in said
    holotrain.done(*again, "callbacks.early_stopping.patience=3")
    assert summary(Path("run"))["epochs"] == 4


def test_a_training_that_was_cut_short_within_an_epoch_goes_on(holotrain):
    words = ["fit", *QUICK, "scheduler=constant", "trainer.max_epochs=1"]
    holotrain.done(*words, "trainer.max_steps=1", "hydra.run.dir=run")
    left = summary(Path("run"))
    assert (left["epochs"], left["whole_epochs"], left["steps"]) == (1, 0, 1)
    holotrain.done("fit", "resume=true", "hydra.run.dir=run", "trainer.max_steps=2")
    holotrain.done(*words, "trainer.max_steps=2", "hydra.run.dir=at_once")
    assert_same_weights(Path("run/checkpoints/last.ckpt"), Path("at_once/checkpoints/last.ckpt"))
    said = " ".join(holotrain.done("fit", "resume=true", "hydra.run.dir=run").split())
    assert "already complete, 2 of 2 steps; to train on, raise trainer.max_steps" in said
    holotrain.done("fit", "resume=true", "hydra.run.dir=run", "trainer.max_steps=-1")
    assert (summary(Path("run"))["whole_epochs"], summary(Path("run"))["steps"]) == (1, 3)


def test_a_training_that_diverges_says_so(holotrain):
    with pytest.warns(UserWarning, match="train/loss is nan since epoch"):
        _, _, err = holotrain(
            "fit", *QUICK, "backward=autograd", "optimizer.lr=1e30", "trainer.gradient_clip_val=null", "hydra.run.dir=run"
        )
    assert summary(Path("run"))["status"] == "diverged"
    assert "holotrain: the training has diverged: train/loss is nan since epoch" in err


@pytest.fixture
def trained(image_run):
    """A finished run, and the best checkpoint in it."""
    return image_run, image_run / "checkpoints" / Path(summary(image_run)["checkpoint"]).name


def test_evaluation_needs_the_checkpoint_alone(holotrain, trained):
    folder, checkpoint = trained
    expected = summary(folder)["metrics"]
    for command, metric in (("test", "test/accuracy"), ("validate", "val/accuracy")):
        out = holotrain.done(command, f"ckpt_path={checkpoint}")
        left = summary(only(Path("runs") / command))
        assert left["metrics"][metric] == pytest.approx(expected[metric])
        assert left["checkpoint"] == str(checkpoint) and metric in out
    # overrides change what the checkpoint brings
    holotrain.done("test", f"ckpt_path={checkpoint}", "trainer.limit_test_batches=1.0", "output_dir=other")
    assert summary(only(Path("other/test")))["metrics"] != expected


@pytest.mark.slow
def test_what_was_trained_without_evaluation_is_evaluated_when_asked(holotrain):
    """The checkpoint brings limits of zero along; a training with them leaves its test out."""
    words = ["trainer.limit_val_batches=0", "trainer.limit_test_batches=0", "trainer.max_epochs=1", "test=true"]
    holotrain.done("fit", *QUICK, *words, "hydra.run.dir=run")
    for command, limit in (("validate", "limit_val_batches"), ("test", "limit_test_batches")):
        assert f"use trainer.{limit}=1.0" in holotrain.refused(command, "ckpt_path=run")
        assert holotrain(command, "ckpt_path=run", f"trainer.{limit}=1.0")[0] == 0


def test_predictions_of_the_test_part_and_of_files(holotrain, trained):
    from PIL import Image

    predict = ["predict", f"ckpt_path={trained[1]}"]
    out = holotrain.done(*predict, "data.batch_size=100", "hydra.run.dir=test_part")
    assert re.search(r"predictions +test_part/predictions.csv", out)
    found = rows(Path("test_part/predictions.csv"))
    assert len(found) == 359 and found[3]["image"] == "3"
    assert all(row["class"] in set("0123456789") and 0.1 <= float(row["probability"]) <= 1 for row in found)
    Path("mine").mkdir()
    for name in ("a.png", "b.jpg"):
        Image.new("RGB", (30, 50), "white").save(Path("mine") / name)
    holotrain.done(*predict, "images=mine", "hydra.run.dir=files")
    assert [row["image"] for row in rows(Path("files/predictions.csv"))] == ["mine/a.png", "mine/b.jpg"]
    Path("mine/b.jpg").write_bytes(b"broken")
    with pytest.warns(UserWarning, match=r"left out: mine/b.jpg is not a readable image"):
        status, out, _ = holotrain(*predict, "images=mine", "hydra.run.dir=one_broken")
    assert status == 0 and re.search(r"unreadable +1 ", out)
    assert [row["image"] for row in rows(Path("one_broken/predictions.csv"))] == ["mine/a.png"]
    status, _, err = holotrain(*predict, "images=mine/b.jpg")
    assert status == 2 and "images: there is no readable image in mine/b.jpg" in err


def test_average_weights_are_what_is_tested_and_saved(holotrain):
    words = ["callbacks=ema", "callbacks.ema.decay=0.5", "trainer.limit_test_batches=1.0", "test=true"]
    holotrain.done("fit", *QUICK, *words)
    left = summary(only(Path("runs/fit")))
    holotrain.done("test", f"ckpt_path={left['checkpoint']}")
    assert summary(only(Path("runs/test")))["metrics"]["test/loss"] == pytest.approx(left["metrics"]["test/loss"])
    checkpoint = torch.load(left["checkpoint"], weights_only=True)
    pairs = zip(checkpoint["state_dict"].values(), checkpoint["current_model_state"].values(), strict=True)
    assert any(not torch.equal(average, current) for average, current in pairs)


def test_sigterm_saves_says_how_to_resume_and_ends_a_sweep(holotrain, monkeypatch):
    from holotrain.checkpoints.exact_resume import ExactResume

    def terminate(self, trainer, module, batch, index):
        if trainer.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(ExactResume, "on_train_batch_start", terminate)
    status, _, err = holotrain("fit", "-m", *QUICK, "seed=1,2")
    assert status == 128 + signal.SIGTERM
    sweep = only(Path("runs/fit/sweeps"))
    assert "SIGTERM" in err and f"holotrain fit resume=true hydra.run.dir={sweep}/0" in err
    assert summary(sweep / "0")["status"] == "interrupted" and not (sweep / "1").exists()
    monkeypatch.setattr(ExactResume, "on_train_batch_start", pl.Callback.on_train_batch_start)
    assert "last.ckpt" in holotrain.done("fit", "resume=true", f"hydra.run.dir={sweep}/0")
    assert summary(sweep / "0")["steps"] == 6


def test_a_run_that_lacks_its_test_alone_is_resumed(holotrain):
    write_folder(Path("photos"), size=16)
    broken = Path("photos/test/cat/1.jpg")
    Path("photos/val").rename("photos/test")
    shutil.copytree("photos/test", "photos/val")
    broken.write_bytes(b"broken")
    words = ["data=imagefolder", "data.root=photos", "data.image_size=16", "data.batch_size=4", "data.num_workers=0"]
    words += [*SMALL, "logger=none", "trainer.max_epochs=1", "hydra.run.dir=run"]
    err = holotrain.refused("fit", *words)
    assert err.endswith("leaves such images out; resume with: python -m holotrain fit resume=true hydra.run.dir=run\n")
    with pytest.warns(UserWarning, match="left out: photos/test/cat/1.jpg"):
        assert holotrain("fit", "resume=true", "hydra.run.dir=run", "data.on_corrupt=skip")[0] == 0
    left = summary(Path("run"))
    assert (
        left["status"] == "completed" and 0 <= left["metrics"]["best/val/accuracy"] <= 1 and "test/accuracy" in left["metrics"]
    )


def test_a_sweep_ends_with_its_table(holotrain):
    words = ["optimizer.lr=1e-3,1e-4", "data=digits", "model=rev_vit_tiny", *QUICK, "test=true", "trainer.max_epochs=1"]
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


def test_a_debugging_run_of_one_batch_leaves_no_checkpoint(holotrain):
    holotrain.done("fit", *SMALL[:3], "debug=fast", "hydra.run.dir=fast")
    assert not Path("fast/checkpoints").exists()


def test_checkpoints_that_do_not_fit_are_refused(holotrain, trained):
    folder, checkpoint = trained
    before = checkpoint.read_bytes()
    for words, expected in [
        (["fit", f"ckpt_path={checkpoint}", "model.dim=32"], "another model"),
        (["test", f"ckpt_path={checkpoint}", "data=fake", "data.num_classes=3"], "was trained on other classes"),
        (
            ["fit", f"ckpt_path={checkpoint}", "optimizer=adamw"],
            "trained with holotrain.tasks.optimizer_functions.sgd; leave the option out",
        ),
        (
            ["fit", f"ckpt_path={checkpoint}", "synthesis.exclude=['*norm*']", "trainer.max_epochs=3"],
            "another synthesis: parameters is",
        ),
        (["fit", f"ckpt_path={folder}"], "checkpoints/last.ckpt has trained 2 epochs; to train on, give more"),
    ]:
        status, _, err = holotrain(*words)
        assert status == 2 and expected in err, (words, err)
        assert err.count("\n") <= 3 and "Traceback" not in err
    assert checkpoint.read_bytes() == before


def test_help_lists_commands_groups_and_options(holotrain):
    out = holotrain.done("--help")
    assert all(command in out for command in ("fit", "validate", "test", "predict"))
    out = holotrain.done("fit", "--help", "data=imagefolder")
    shown = ["rev_vit_tiny", "imagefolder", "data.on_corrupt=error", "optimizer.lr=", "--multirun", "warn, leave it out"]
    assert all(word in out for word in shown), out
    assert re.findall(r"\n  (\S+)=\.\.\. ", out) == ["data.root"]
    keys = re.findall(r"(?m)^  ([a-z_0-9.]+)=", out)
    assert len(keys) == len({*keys}) > 100 and {"optimizer.lr", "trainer.max_epochs", "resume"} <= {*keys}
    assert "temperature=0.8" in holotrain.done("generate", "--help")


def test_a_warning_says_that_there_are_more_workers_than_cores(holotrain, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0}, raising=False)
    with pytest.warns(UserWarning) as found:
        assert holotrain("fit", *QUICK, "data.num_workers=2")[0] == 0
    said = {str(each.message) for each in found if "worker" in str(each.message)}
    assert len(said) == 1 and "will create 2 worker processes in total" in said.pop()
    assert (worker_count(None), worker_count(0), worker_count(3)) == (1, 0, 3)


def test_what_a_run_with_numbers_as_keys_writes_can_be_read(holotrain):
    gas = "lightning.pytorch.callbacks.GradientAccumulationScheduler"
    words = [f"callbacks.gas._target_={gas}", "callbacks.gas.scheduling={0:1,1:2}"]
    holotrain.done("fit", *QUICK, *words, "hydra.run.dir=run")
    assert "test/accuracy" in holotrain.done("test", "ckpt_path=run", "trust=lightning")


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


@pytest.mark.parametrize(("depth", "epochs", "accuracy"), [slow(1, 10, 0.97), long(17, 40, 0.95)])
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


@pytest.mark.slow
def test_a_folder_with_a_space_and_an_umlaut_in_its_name(tmp_path):
    """The source, a part of the tests with their files, and a run."""
    here = tmp_path / "zum Üben"
    for name in ("holotrain", "conf", "tests"):
        shutil.copytree(ROOT / name, here / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", here)
    part = ["tests/checkpoints/test_checkpoints_reading.py", "tests/test_targets.py"]
    environment = os.environ | {"PYTHONPATH": str(here)}
    for words in (["pytest", "-n", "0", f"--basetemp={here / 'tmp'}", *part], ["holotrain", "fit", *SMALL]):
        ended = subprocess.run([sys.executable, "-m", *words], cwd=here, env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    assert (only(here / "runs/fit") / "summary.json").exists()
