"""Several processes that train together, against one: strategies, checkpoints, sweeps, deaths, refusals."""

import csv
import json
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed
from compared import assert_close, assert_equal
from covering import long, slow
from data_files import write_letters
from forked import Forked
from gloo_pair import by_forks, statuses_of
from left_by_runs import only, summary, weights
from made_once import made_once

from holotrain.folders import LAST_CHECKPOINT as LAST
from holotrain.models.checkpoint_files import load, read_weights

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")

STEPS = 6
IMAGES = [
    "model=rev_vit_tiny", "model.dim=16", "model.depth=2", "model.heads=2", "data.mixup_alpha=0", "data.val_fraction=0.05",
    f"trainer.limit_train_batches={STEPS}",
]  # fmt: skip
TEXT = [
    "task=causal_lm", "model=rev_gpt_tiny", "model.dim=16", "model.depth=2", "model.heads=2", "data=text_files",
    "data.files=[text/*.txt]", "data.context=16", "data.cache_dir=cache", "trainer.accumulate_grad_batches=2",
    "trainer.gradient_clip_val=0.1", f"trainer.limit_train_batches={2 * STEPS}",
]  # fmt: skip
SHARED = [
    "trainer.accelerator=cpu", "trainer.precision=64-true", "trainer.max_epochs=1", "trainer.log_every_n_steps=1",
    "callbacks.progress=null", "logger=csv", "trainer.timeout=100", "data.batch_size=8", "test=false", "scheduler=constant",
]  # fmt: skip
FEW = ["trainer.max_steps=6", "trainer.limit_val_batches=1"]
CONTINUED = [*IMAGES, *SHARED, "trainer.limit_train_batches=3", "trainer.max_epochs=2", "trainer.limit_val_batches=1"]


def losses(folder: Path, tag: str = "train/loss") -> list[float]:
    """Of all the logs of a run: of its parts, where it was resumed."""
    logs = sorted((folder / "csv").glob("version_*/metrics.csv"))
    return [float(row[tag]) for log in logs for row in csv.DictReader(log.open()) if row[tag]]


KINDS = {"images": IMAGES, "text": TEXT}
QUICK, SLOW = ("images", "ddp", "reversible"), ("text", "fsdp", "pareprop")
"""Every pair is done in a long test."""
EACH_PAIR = [
    ("images" if number % 2 == 0 or strategy == "pipeline" else "text", strategy, backward)
    for number, (strategy, backward) in enumerate(
        product(("ddp", "fsdp", "tp", "pipeline"), ("autograd", "reversible", "pareprop"))
    )
]
"""Each strategy by each backward. A pipeline cannot accumulate gradients over batches, as the training of text does."""


def runs_of(cases: list[tuple[str, str, str]]) -> dict[str, list[str]]:
    return {"_".join(case): [*KINDS[case[0]], *SHARED, f"trainer={case[1]}", f"backward={case[2]}"] for case in cases}


MISTAKEN = {"mistaken": [*TEXT, *SHARED, "trainer=ddp", "data.files=[none/*.txt]"]}
BEGUN = ["-m", *CONTINUED, "trainer=fsdp,tp", "trainer.max_epochs=1", "trainer.sharded_checkpoints=true"]


def done_by_two_ranks(folder: Path, commands: dict[str, list[str]]) -> None:
    """Has all command lines done by two processes in ``folder``; each leaves there what it saw and said."""
    write_letters(folder / "text")
    run_or_sweep = {name: "sweep" if "-m" in words else "run" for name, words in commands.items()}
    work = [(name, ["fit", *words, f"hydra.{run_or_sweep[name]}.dir=did_{name}"]) for name, words in commands.items()]
    script = Path(__file__).with_name("two_ranks.py")

    def start(rank: int) -> Forked:
        streams = {name: folder / f"{name}_{rank}" for name in ("out", "errors")}
        return Forked(script, rank, json.dumps(work), f"found_{rank}.json", folder=folder, **streams)

    statuses = statuses_of(2, start)
    said = [(folder / f"{name}_{rank}").read_text() for name in ("out", "errors") for rank in "01"]
    assert statuses == [0, 0] and said[1] == "", said


def found_by_two_ranks(tmp_path_factory, name: str, work: dict) -> tuple[Path, list[dict]]:
    """The folder where two processes did all of the work, and what each of them wrote down.

    Parameters that each process has whole are the same in both, bit for bit, after every training.
    """
    folder = made_once(tmp_path_factory, name, lambda made: done_by_two_ranks(made, work))
    found = [json.loads((folder / f"found_{rank}.json").read_text()) for rank in (0, 1)]
    zero, one = (rank["seen"] for rank in found)
    for run in (run for run, noted in zero.items() if "alike" in noted):
        assert zero[run]["alike"] == one[run]["alike"], run
    return folder, found


@pytest.fixture(scope="session")
def quick(tmp_path_factory) -> tuple[Path, list[dict]]:
    return found_by_two_ranks(tmp_path_factory, "two_ranks", runs_of([QUICK]) | MISTAKEN)


@pytest.fixture(scope="session")
def left(tmp_path_factory) -> tuple[Path, list[dict]]:
    return found_by_two_ranks(tmp_path_factory, "two_ranks_slow", runs_of([SLOW]) | {"begun": BEGUN})


def assert_losses_of_one_process(holotrain, folder: Path, cases: list, kind: str) -> None:
    """Of the cases of images, or of text with accumulated and clipped gradients, that were done in ``folder``.

    DDP and FSDP2 read 8 samples a process, tensor parallel processes and stages the same 8.
    """
    jobs = {(s, b): folder / f"did_{kind}_{s}_{b}" for of, s, b in cases if of == kind}
    assert {where: (summary(job)["strategy"], summary(job)["backward"]) for where, job in jobs.items()} == {w: w for w in jobs}
    if kind == "text":
        write_letters(Path("text"))
    batches = {where: 8 if where[0] in ("tp", "pipeline") else 16 for where in jobs}
    alone = {
        batch: alone_in(holotrain, str(batch), *KINDS[kind], *SHARED, "backward=autograd", f"data.batch_size={batch}")
        for batch in {*batches.values()}
    }
    for where, job in jobs.items():
        found, batch = summary(job), batches[where]
        reference = alone[batch]
        assert len(losses(job)) == STEPS and losses(job) == pytest.approx(losses(reference), rel=1e-9), where
        # of a step; those that several processes share count once
        samples = found["samples_per_second"] * found["step_seconds"]
        assert samples == pytest.approx(batch * (2 if kind == "text" else 1))
        for tag in ("optimization/gradient_norm", "optimization/update_ratio"):  # of whole tensors, however they are sharded
            norms = losses(reference, tag)
            assert norms and losses(job, tag) == pytest.approx(norms, rel=1e-6), (where, tag)
        # all of the validation part, no sample of it twice
        whole = {name: value for name, value in summary(reference)["metrics"].items() if name.startswith("val/")}
        assert whole and {name: found["metrics"][name] for name in whole} == pytest.approx(whole, rel=1e-6), where
        assert found["processes"] == 2 and {path.name for path in job.iterdir()} >= {"config.yaml", "checkpoints"}


@pytest.mark.parametrize(("case", "done"), [slow(QUICK, "quick"), slow(SLOW, "left")])
def test_losses_are_those_of_one_process(holotrain, request, case, done):
    assert_losses_of_one_process(holotrain, request.getfixturevalue(done)[0], [case], case[0])


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_one_process_under_each_strategy_by_each_backward(holotrain, tmp_path, kind):
    cases = [case for case in EACH_PAIR if case[0] == kind]
    folder = tmp_path / "two_ranks"
    folder.mkdir()
    done_by_two_ranks(folder, runs_of(cases))
    assert_losses_of_one_process(holotrain, folder, cases, kind)


def alone_in(holotrain, name: str, *words: str) -> Path:
    """The folder of a training in this process."""
    holotrain.done("fit", *words, f"hydra.run.dir={name}")
    return Path(name)


def whole_on_all(folder: Path, found: list[dict], name: str) -> tuple[int, int]:
    """How many parameters each process has whole, and how many there are."""
    return found[0]["seen"][name]["alike"][0], len(weights(folder / name / LAST))


@pytest.mark.slow
def test_processes_of_a_launcher_print_a_mistake_once_and_have_all_parameters_under_ddp(quick):
    folder, found = quick
    assert found[1]["statuses"] == dict.fromkeys(runs_of([QUICK]), 0) | {"mistaken": 2}
    (mistake,), (other,) = ((folder / f"errors_{rank}").read_text().splitlines() for rank in (0, 1))
    assert mistake.startswith("holotrain: data.files: ") and not (folder / "did_mistaken").exists()
    assert other.startswith("holotrain: rank 1 failed: rank 0: data.files: ")
    count, everything = whole_on_all(*quick, "did_images_ddp_reversible")
    assert count == everything


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "pairs"), [("tp", "trainer.tensor_parallel=2"), long("pipeline", "trainer.pipeline_stages=2")]
)
def test_two_pairs_of_processes_share_a_model(holotrain, strategy, pairs):
    """FSDP2 between two pairs of processes, each of which is tensor parallel within; averages between two pipelines."""
    write_letters(Path("text"))
    words = [*TEXT, *SHARED, *FEW, "trainer.max_steps=3", "trainer.accumulate_grad_batches=1"]
    several = [f"trainer={strategy}", "trainer.devices=4", pairs, "backward=pareprop"]
    assert by_forks(4, "fit", *words, *several) == (0, [""] * 4)
    run = only(Path("runs/fit"))
    assert summary(run)["processes"] == 4
    alone = alone_in(holotrain, "alone", *words, "data.batch_size=16", "backward=autograd")
    assert losses(run) == pytest.approx(losses(alone), rel=1e-9)
    assert_close(weights(run / LAST), weights(alone / LAST), rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_one_process_continues_what_tensor_parallel_ones_began(holotrain, left):
    checkpoint = left[0] / "did_begun/1" / LAST
    state = load(checkpoint)["state_dict"]
    assert {type(weight) for weight in state.values()} == {torch.Tensor}
    assert checkpoint.is_dir() and all(weight.is_meta for weight in state.values())
    rest = losses(alone_in(holotrain, "rest", *CONTINUED, f"ckpt_path={checkpoint}", "trainer=default"))
    assert rest == pytest.approx(losses(alone_in(holotrain, "whole", *CONTINUED))[3:], rel=1e-9)


@pytest.mark.slow
def test_a_sharded_checkpoint_is_read_by_one_process(holotrain, left):
    checkpoint = left[0] / "did_begun/1" / LAST
    for command in ("validate", "predict", "export"):
        holotrain.done(command, f"ckpt_path={checkpoint}")
    assert summary(only(Path("runs/validate")))["strategy"] == "single"
    exported = read_weights(only(Path("runs/export")) / "export")
    trained = {name.removeprefix("model."): weight for name, weight in read_weights(checkpoint).items()}
    assert trained.keys() == exported.keys()
    assert_equal(exported, {name: weight.float() for name, weight in trained.items()})  # the run was in double precision
