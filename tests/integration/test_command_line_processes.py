"""Several processes that train together, against one: strategies, checkpoints, sweeps, deaths, refusals."""

import csv
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed
from left_by_runs import only, summary

from holotrain.models.pretrained import read_weights
from holotrain.ranks.shards import Sharded, load

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")

STEPS = 10
IMAGES = ["model=rev_vit_tiny", "model.dim=16", "model.depth=2", "model.heads=2"]
TEXT = [
    "task=causal_lm", "model=rev_gpt_tiny", "model.dim=16", "model.depth=2", "model.heads=2", "data=text_files",
    "data.files=[text/*.txt]", "data.context=16", "data.cache_dir=cache", "trainer.accumulate_grad_batches=2",
    "trainer.gradient_clip_val=0.1",
]  # fmt: skip
SHARED = [
    "trainer.accelerator=cpu", "trainer.precision=64-true", "trainer.max_epochs=1", f"trainer.limit_train_batches={STEPS}",
    "trainer.log_every_n_steps=1", "callbacks.progress=none", "logger=csv", "trainer.timeout=100", "data.batch_size=8",
    "test=false", "scheduler=constant",
]  # fmt: skip
CONTINUED = [*IMAGES, *SHARED, "trainer.limit_train_batches=3", "trainer.max_epochs=2", "trainer.limit_val_batches=1"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def losses(folder: Path) -> list[float]:
    rows = csv.DictReader((folder / "csv" / "version_0" / "metrics.csv").open())
    return [float(row["train/loss"]) for row in rows if row["train/loss"]]


def write_text(folder: Path) -> None:
    folder.mkdir()
    for number in range(4):
        text = "".join(chr(97 + (i * i * (number + 3) + i // 7) % 26) for i in range(4000))
        (folder / f"{number}.txt").write_text(text)


WORK = {
    "images": [*IMAGES, *SHARED, "trainer=ddp,fsdp,tp", "backward=reversible"],
    "text": [*TEXT, *SHARED, "trainer=ddp,fsdp,tp", "backward=pareprop"],
    "begun": [*CONTINUED, "trainer=fsdp,tp", "trainer.max_epochs=1"],
    "begun_in_shards": [*CONTINUED, "trainer=fsdp,tp", "trainer.max_epochs=1", "trainer.sharded_checkpoints=true"],
    "continued": [*CONTINUED, "trainer=ddp,fsdp", "ckpt_path=did_begun/0/checkpoints/last.ckpt"],
    "continued_in_shards": [*CONTINUED, "trainer=ddp,fsdp", "ckpt_path=did_begun_in_shards/0/checkpoints/last.ckpt"],
}


@pytest.fixture(scope="module")
def left(tmp_path_factory) -> tuple[Path, dict]:
    """The folder where two processes did all the sweeps of WORK, and what rank 0 wrote down."""
    folder = tmp_path_factory.mktemp("two_ranks")
    write_text(folder / "text")
    here = Path(__file__).parents[1]
    paths = [str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    work = [(free_port(), ["fit", "-m", *words, f"hydra.sweep.dir=did_{name}"]) for name, words in WORK.items()]
    work.append((free_port(), []))
    ranks = [
        subprocess.Popen(
            [sys.executable, Path(__file__).with_name("two_ranks.py"), str(rank), json.dumps(work), "found.json"],
            cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    said = [process.communicate(timeout=500) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
    assert said[1][0] == "" and "Error" not in said[0][1] + said[1][1], said
    return folder, json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("kind", ["images", "text"])
def test_losses_are_those_of_one_process(holotrain, left, kind):
    """DDP and FSDP2 read 8 samples a process, tensor parallel processes the same 8."""
    folder, _ = left
    words = {"images": IMAGES, "text": TEXT}[kind]
    if kind == "text":
        write_text(Path("text"))
    alone = {}
    for batch in (8, 16):
        status, _, _ = holotrain("fit", *words, *SHARED, "backward=autograd", f"data.batch_size={batch}", f"output_dir={batch}")
        assert status == 0
        alone[batch] = only(Path(f"{batch}/fit"))
    jobs = sorted((folder / f"did_{kind}").glob("[0-9]*"))
    assert len(jobs) == 3
    for job in jobs:
        found = summary(job)
        reference = alone[8 if found["strategy"] == "tp" else 16]
        expected = losses(reference)
        assert len(expected) == (STEPS if kind == "images" else STEPS // 2)
        where = (found["strategy"], found["backward"])
        assert losses(job) == pytest.approx(expected, rel=1e-9), where
        # all of the validation part, no sample of it twice
        whole = {name: value for name, value in summary(reference)["metrics"].items() if name.startswith("val/")}
        assert {name: found["metrics"][name] for name in whole} == pytest.approx(whole, rel=1e-6), where
        assert found["processes"] == 2 and {path.name for path in job.iterdir()} >= {"config.yaml", "checkpoints"}


@pytest.mark.parametrize("kind", ["", "_in_shards"])
@pytest.mark.parametrize("job", ["0", "1"])
def test_a_sharded_training_continues_on_any_number_of_processes(holotrain, left, kind, job):
    """Job 0 began under FSDP2, job 1 tensor parallel; both end here as they end where two processes continue them."""
    folder, _ = left
    checkpoint = folder / f"did_begun{kind}" / job / "checkpoints" / "last.ckpt"
    kept = load(checkpoint)
    kinds = {type(weight) for weight in kept["state_dict"].values()}
    assert checkpoint.is_dir() == (Sharded in kinds) == bool(kind) and kinds <= {torch.Tensor, Sharded}
    batch = 8 if job == "1" else 16
    status, _, err = holotrain(
        "fit", *CONTINUED, f"ckpt_path={checkpoint}", f"data.batch_size={batch}", "trainer=default", "hydra.run.dir=alone"
    )
    assert (status, err) == (0, "")
    if job == "0":
        for strategy in ("0", "1"):
            assert losses(folder / f"did_continued{kind}" / strategy) == pytest.approx(losses(Path("alone")), rel=1e-6)
    status, _, _ = holotrain("fit", *CONTINUED, f"data.batch_size={batch}", "hydra.run.dir=whole")
    assert losses(Path("alone")) == pytest.approx(losses(Path("whole"))[3:], rel=1e-6)


@pytest.mark.parametrize("kind", ["", "_in_shards"])
def test_a_sharded_checkpoint_is_read_by_one_process(holotrain, left, kind):
    checkpoint = left[0] / f"did_begun{kind}" / "1" / "checkpoints" / "last.ckpt"
    for command in ("validate", "predict", "export"):
        status, _, err = holotrain(command, f"ckpt_path={checkpoint}")
        assert (status, err) == (0, "")
    assert summary(only(Path("runs/validate")))["strategy"] == "single"
    exported = read_weights(only(Path("runs/export")) / "export")
    weights = {name.removeprefix("model."): weight for name, weight in read_weights(checkpoint).items()}
    assert weights.keys() == exported.keys()
    assert all(torch.equal(weights[name].float(), exported[name]) for name in weights)  # the run was in double precision


def test_a_run_that_left_shards_is_resumed_in_its_folder(holotrain, left):
    """By one process, which writes whole checkpoints."""
    folder = Path(shutil.copytree(left[0] / "did_begun_in_shards" / "0", "resumed"))
    words = ["trainer=default", "data.batch_size=16", "resume=true", f"hydra.run.dir={folder}"]
    status, _, err = holotrain("fit", *CONTINUED, *words)
    assert (status, err) == (0, "")
    assert (summary(folder)["steps"], load(folder / "checkpoints" / "last.ckpt")["global_step"]) == (6, 6)


@pytest.mark.parametrize("command", ["fit", "validate", "export"])
@pytest.mark.parametrize("lost", ["shards-*/*.safetensors", "shards-*", "checkpoint.pt"])
def test_a_checkpoint_that_lost_a_part_is_refused_in_a_line(holotrain, left, command, lost):
    checkpoint = Path(shutil.copytree(left[0] / "did_begun_in_shards" / "0" / "checkpoints" / "last.ckpt", "broken.ckpt"))
    part = min(checkpoint.glob(lost))
    shutil.rmtree(part) if part.is_dir() else part.unlink()
    words = [*CONTINUED, "trainer=default"] if command == "fit" else []
    status, _, err = holotrain(command, *words, f"ckpt_path={checkpoint}")
    assert (status, err.count("\n")) == (2, 1) and err.startswith("holotrain: ckpt_path: broken.ckpt/"), err


@pytest.mark.parametrize("backward", ["reversible", "pareprop"])
def test_gradients_are_sent_before_the_first_block_has_its_own(left, backward):
    order = left[1]["orders"][backward]
    assert order.count("first block") > 4 and order.index("all-reduce") < order.index("first block")


def test_a_sweep_outlives_a_rank_that_is_killed_and_is_resumed(holotrain, monkeypatch):
    """kill -9 of rank 1 in the second job; the processes are started by the command line."""
    from holotrain.callbacks import ExactResume
    from holotrain.ranks import launch

    children = []

    class Popen(subprocess.Popen):
        def __init__(self, *arguments, **keywords) -> None:
            super().__init__(*arguments, **keywords)
            children.append(self)

    def kill(self, trainer, module, batch, index) -> None:
        if len(children) == 2 and trainer.global_step == 4:
            children[1].kill()

    monkeypatch.setattr(launch.subprocess, "Popen", Popen)
    monkeypatch.setattr(ExactResume, "on_train_batch_start", kill)
    words = ["trainer=ddp", "trainer.devices=2", *CONTINUED, "logger=none", "optimizer.lr=1e-3,1e-4"]
    status, out, err = holotrain("fit", "-m", *words)
    (sweep,) = Path("runs/fit/sweeps").iterdir()
    said = f"holotrain: rank 1 (process {children[1].pid}) was ended by SIGKILL; resume with: "
    assert (status, err.count("\n")) == (1, 1) and err.startswith(said) and f"hydra.run.dir={sweep}/1" in err
    rows = list(csv.DictReader((sweep / "sweep.csv").open()))
    assert [row["status"] for row in rows] == ["completed", "failed"] and out.count("sweep of 2 jobs") == 1
    assert torch.load(sweep / "1/checkpoints/last.ckpt", weights_only=True)["global_step"] == 3
    assert not (sweep / "2").exists()

    monkeypatch.setattr(ExactResume, "on_train_batch_start", lambda *_: None)
    status, out, err = holotrain("fit", "-m", "resume=true", *words)
    assert (status, err) == (0, "")
    assert [summary(sweep / job)["steps"] for job in "01"] == [6, 6]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["trainer.devices=2"], "trainer=default trains in one process"),
        (["trainer=ddp", "trainer.backend=nccl"], "trainer.backend=nccl: it joins NVIDIA GPUs"),
        (["trainer=ddp", "trainer.backend=mpi"], "'mpi' is not one of auto, nccl, gloo"),
        (["trainer=ddp", "trainer.num_nodes=2"], "start it with torchrun or srun"),
        (["trainer=tp", "trainer.devices=4", "trainer.tensor_parallel=3"], "it does not divide 4 processes"),
        (["trainer=fsdp", "trainer.compression=bf16"], "an option of trainer=ddp alone"),
        (["trainer=ddp", "trainer.sharded_checkpoints=true"], "an option of trainer=fsdp and trainer=tp alone"),
        (["trainer=fsdp", "synthesis=associative"], "synthesis=associative: it transforms whole gradients"),
        (["trainer=tp", "callbacks=ema"], "callbacks.ema: it averages whole weights"),
        (["trainer=fsdp", "backward=auto"], "choose backward and batch yourself"),
        (["trainer=tp", "model.trained=adapters", "model.adapters=4"], "trainer=tp shares out plain layers"),
        (["trainer=fsdp", "trainer.precision=16-mixed"], "trainer=fsdp cannot scale gradients"),
        (["trainer=ddp", "trainer.timeout=0"], "trainer.timeout: 0"),
        (["trainer=tp", "trainer.overlap=null", "trainer.signals=true"], "an option of trainer=tp with trainer.overlap"),
        (["trainer=tp", "trainer.devices=2", "trainer.signals=true"], "trainer.signals: it needs NVIDIA GPUs"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(holotrain, words, expected):
    status, _, err = holotrain("fit", "trainer.accelerator=cpu", *words, "trainer.accelerator=cpu")
    assert status == 2 and expected in err and err.count("\n") == 1, err


def test_a_port_in_use_is_told_in_a_line(holotrain, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        status, _, err = holotrain("fit", "trainer=ddp", "trainer.devices=2", *IMAGES, *SHARED)
    assert status == 2 and "the port is in use" in err and err.count("\n") == 1


def test_more_devices_than_there_are_is_told_in_a_line(holotrain, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    status, _, err = holotrain("fit", "trainer=ddp", "trainer.devices=2", "logger=none")
    assert status == 2 and "this machine has 1 GPU" in err and err.count("\n") == 1
