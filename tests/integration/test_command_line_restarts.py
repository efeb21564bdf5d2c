"""What becomes of a training whose processes the command line started, when something happens to one of them."""

import random
import re
import signal
import socket
from pathlib import Path

import datasets
import psutil
import pytest
import torch.distributed
from covering import long, slow
from gloo_pair import by_forks
from left_by_runs import assert_same_weights, only, rows, summary, weights

from holotrain.parallel.launch import Loopback

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")

LAST = Path("checkpoints/last.ckpt")
WORDS = [
    "model=rev_vit_tiny", "model.dim=16", "model.depth=2", "model.heads=2", "model.dropout=0.1", "data.batch_size=8",
    "test=false", "trainer=ddp", "trainer.devices=2", "trainer.accelerator=cpu", "trainer.precision=64-true",
    "trainer.timeout=60", "trainer.limit_train_batches=3", "trainer.max_epochs=2", "trainer.limit_val_batches=1",
    "callbacks.progress=null", "logger=none", "hydra.run.dir=run",
]  # fmt: skip


def incident(what: str, **options: int) -> list[str]:
    given = {"_target_": "incidents.Incident", "what": f"'{what}'", **options}
    return [f"+callbacks.incident.{name}={value}" for name, value in given.items()]


STREAM = ["task=causal_lm", "model=rev_gpt_tiny", "data=hub", "data.name=saved", "data.context=24", "data.epoch_batches=3"]
STREAM += ["data.val_fraction=0.1", "data.streaming=true", "data.cache_dir=cache"]
RESTARTED = {"DDP": [], "a pipeline": ["trainer=pipeline"], "a stream": STREAM}


def save_text() -> None:
    draw = random.Random(1)
    datasets.disable_progress_bars()
    texts = {"text": [" ".join(draw.choices("abcdefgh", k=60)) for _ in range(200)]}
    datasets.Dataset.from_dict(texts).save_to_disk("saved", num_shards=2)


def said(err: str) -> list[str]:
    """By holotrain, without what the other process says if the launcher's SIGTERM finds it within a step, and without PyTorch's
    own remarks on broken connections."""
    lines = [line for line in err.splitlines() if line.startswith("holotrain: ")]
    return [line for line in lines if not line.startswith("holotrain: SIGTERM: saving")]


@pytest.mark.parametrize("kind", [slow(kind) if kind == "DDP" else long(kind) for kind in RESTARTED])
def test_after_kill_9_all_start_again_and_end_as_if_nothing_had_been(holotrain, kind):
    save_text()
    words = [*WORDS, *RESTARTED[kind]]
    status, _, err = holotrain("fit", *words, "trainer.max_restarts=1", *incident("SIGKILL"))
    assert status == 0 and "Traceback" not in err, err
    assert said(err) == ["holotrain: a process failed; restart 1 of 1, from run/checkpoints/last.ckpt"], err
    assert (summary(Path("run"))["steps"], summary(Path("run"))["processes"]) == (6, 2)
    assert by_forks(2, "fit", *words, "hydra.run.dir=whole")[0] == 0
    assert_same_weights(Path("run") / LAST, Path("whole") / LAST)


@pytest.mark.slow
def test_a_restart_falls_back_from_a_damaged_checkpoint(holotrain):
    words = [*(word.replace("trainer=ddp", "trainer=fsdp") for word in WORDS), "trainer.sharded_checkpoints=true"]
    status, _, err = holotrain("fit", *words, "trainer.max_restarts=1", *incident("damage"))
    assert status == 0 and len(said(err)) == 2 and "Traceback" not in err, err
    first, second = said(err)
    assert second == "holotrain: a process failed; restart 1 of 1, from run/checkpoints/last.ckpt"
    assert "is damaged (its checksum differs); continuing from run/checkpoints/best-epoch0-step3.ckpt" in first
    assert by_forks(2, "fit", *words, "hydra.run.dir=whole")[0] == 0
    assert_same_weights(Path("run") / LAST, Path("whole") / LAST)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "words", "status", "line"),
    [
        ("SIGKILL", [], 1, r"rank 1 \(process \d+\) was killed by SIGKILL; resume with: .* fit resume=true hydra.run.dir=run"),
        ("error", [], 1, "rank 1 failed: RuntimeError: the disk is full; resume with: "),
        ("mistake", [], 2, "give another disk$"),
        ("SIGSTOP", ["trainer.timeout=5"], 1, "rank 0 failed: .*imed out"),
    ],
)
def test_what_ends_a_process_is_said_in_one_line(holotrain, what, words, status, line):
    exit_status, _, err = holotrain("fit", *WORDS, *words, *incident(what))
    assert (exit_status, len(said(err))) == (status, 1) and re.match(f"holotrain: {line}", said(err)[0]), err
    if what != "SIGSTOP":  # the error of a timeout has causes, with tracebacks of their own
        assert err.count("Traceback") == (what == "error"), err
    assert weights(Path("run") / LAST)


@pytest.mark.parametrize("name", [slow("SIGTERM"), long("SIGINT")])
def test_a_signal_saves_and_ends_all(holotrain, name):
    signum = getattr(signal, name)
    before, children = signal.getsignal(signum), set(psutil.Process().children(recursive=True))
    status, _, err = holotrain("fit", *WORDS, "data.num_workers=1", *incident(f"parent {name}"))
    assert status == 128 + signum and "ended the training; its state is in run/checkpoints/last.ckpt" in err, err
    assert signal.getsignal(signum) is before
    assert torch.load(Path("run") / LAST, weights_only=True)["global_step"] in (5, 6)
    begun = set(psutil.Process().children(recursive=True)) - children
    assert [child for child in begun if "holotrain" in " ".join(child.cmdline())] == []


@pytest.mark.slow
def test_a_sweep_outlives_a_process_that_is_killed_and_is_resumed(holotrain):
    words = [*WORDS[:-1], "+callbacks.incident.step=9,4", *incident("SIGKILL")[:2]]
    status, out, err = holotrain("fit", "-m", *words)
    sweep = only(Path("runs/fit/sweeps"))
    assert status == 1 and len(said(err)) == 1 and "Traceback" not in err, err
    assert "was killed by SIGKILL; resume the sweep with its command plus " in said(err)[0], err
    assert f"hydra.run.dir={sweep}/1" in err and out.count("sweep of 2 jobs") == 1
    jobs = rows(sweep / "sweep.csv")
    assert [row["status"] for row in jobs] == ["completed", "failed"] and "was killed by SIGKILL" in jobs[1]["error"]

    before = summary(sweep / "0")
    out = holotrain.done("fit", "-m", "resume=true", *words[:-3], "+callbacks.incident.step=9,8", *words[-2:])
    assert [summary(sweep / job)["steps"] for job in "01"] == [6, 6]
    assert summary(sweep / "0") == before and "already complete, 2 of 2 epochs; nothing to do" in " ".join(out.split())


def test_the_store_listens_on_this_machine_alone(tmp_path):
    rendezvous = Loopback("job", tmp_path / "mistake.txt")
    found = rendezvous.next_rendezvous()
    port = found.bootstrap_store_info.master_port
    listening = {c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port}
    assert listening == {"127.0.0.1"}
    with socket.create_connection(("127.0.0.1", port)):
        pass
    assert rendezvous.next_rendezvous().bootstrap_store_info.master_port != port  # nothing of the first attempt is left
