"""Bits of a checkpoint have flipped: a resumed run continues from the one before, other commands refuse it and name that."""

import os
import shutil
from pathlib import Path

import pytest
from left_by_runs import assert_same_weights, flip_a_bit, summary
from small_run import SMALL, fit_in

from holotrain.commands.run_folder import alone_in
from holotrain.models.checkpoint_files import CHECKPOINT, begun

WORDS = [*SMALL, "test=false", "logger=none", "callbacks.checkpoint.save_top_k=2"]
LAST, BEST = (Path("run/checkpoints") / name for name in ("last.ckpt", "best-epoch1-step6.ckpt"))
SAID = f"{LAST} is damaged (its checksum differs)"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    fit_in(folder, *WORDS, "hydra.run.dir=run")
    return folder / "run"


@pytest.fixture
def run(trained, holotrain):
    shutil.copytree(trained, "run")
    os.utime(BEST, (0, 0))  # as a clock that is set back, or a copy, leaves it
    return Path("run")


def test_a_damaged_last_checkpoint_falls_back_to_the_one_before(holotrain, run):
    """And ends as a run that was resumed from that one."""
    more = ["resume=true", "trainer.max_epochs=3"]
    assert BEST.exists() and len([*LAST.parent.glob("best-*")]) == 2
    shutil.copytree(run, "other")
    holotrain.done("fit", *more, "hydra.run.dir=other")
    flip_a_bit(LAST)
    assert holotrain("fit", *more, "hydra.run.dir=run")[::2] == (0, f"holotrain: {SAID}; continuing from {BEST}\n")
    assert summary(run)["steps"] == 9
    assert_same_weights(LAST, Path("other/checkpoints/last.ckpt"))
    assert not [*LAST.parent.glob(".last*")]


def test_a_damaged_one_is_passed_over(holotrain, run):
    (first,) = LAST.parent.glob("best-epoch0*")
    flip_a_bit(LAST)
    flip_a_bit(BEST)
    said = f"holotrain: {SAID}; continuing from {first}\n"
    assert holotrain("fit", "resume=true", "hydra.run.dir=run", "trainer.max_epochs=3")[::2] == (0, said)


def test_where_none_is_sound_nothing_changes(holotrain, run):
    for path in LAST.parent.glob("[bl]*.ckpt"):
        flip_a_bit(path)
    before = {path: path.read_bytes() for path in LAST.parent.glob("[bl]*.ckpt")}
    assert holotrain.refused("fit", "resume=true", "hydra.run.dir=run") == f"holotrain: ckpt_path: {SAID}\n"
    assert {path: path.read_bytes() for path in LAST.parent.glob("[bl]*.ckpt")} == before


@pytest.mark.slow
def test_jobs_of_a_sweep_fall_back_too(holotrain):
    words = [*WORDS, "hydra.sweep.dir=sweep", "optimizer.lr=1e-3,1e-4"]
    holotrain.done("fit", "-m", *words)
    last = Path("sweep/1/checkpoints/last.ckpt")
    flip_a_bit(last)
    said = f"holotrain: {last} is damaged (its checksum differs); continuing from {last.with_name(BEST.name)}\n"
    assert holotrain("fit", "-m", *words, "resume=true", "trainer.max_epochs=3")[::2] == (0, said)


@pytest.mark.slow
def test_a_folder_has_its_name_only_where_no_other_run_is(holotrain, run):
    """The run that is about to rename it may live."""
    temporary, more = begun(LAST), ["resume=true", "hydra.run.dir=run", "trainer.max_epochs=3"]
    temporary.mkdir()
    LAST.rename(temporary / CHECKPOINT)
    with alone_in(run):
        for words, expected in ((["--cfg", "job"], 0), ([], 2)):
            status, _, err = holotrain("fit", *more, *words)
            assert status == expected and ("another run is writing into it" in err) == bool(status)
            assert temporary.exists() and not LAST.exists()
    holotrain.done("fit", *more)
    assert summary(run)["steps"] == 9 and LAST.exists() and not temporary.exists()


@pytest.mark.parametrize("command", ["fit", "test", "predict", "export"])
def test_one_that_is_named_is_refused(holotrain, run, command):
    flip_a_bit(LAST)
    assert holotrain.refused(command, f"ckpt_path={LAST}") == f"holotrain: ckpt_path: {SAID}; {BEST} is sound\n"


def test_one_that_is_damaged_is_not_loaded(run):
    import holotrain

    flip_a_bit(LAST)
    with pytest.raises(holotrain.UserError, match=r"last.ckpt is damaged \(its checksum differs\); .*best-.* is sound$"):
        holotrain.load(LAST)
