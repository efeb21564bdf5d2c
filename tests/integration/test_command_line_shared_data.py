"""Two processes whose data differ, or of which one has a mistake in its data: both end with one line, before they train."""

import os
from pathlib import Path

import pytest
import torch.distributed
from data_files import write_letters
from forked import COMMAND_LINE, Forked
from gloo_pair import free_port, statuses_of
from small_run import SMALL

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")

SHARED = [*SMALL, "trainer=ddp", "trainer.timeout=60", "logger=none", "callbacks.progress=null", "test=false"]
TEXT = ["task=causal_lm", "model=rev_gpt_tiny", "data=text_files", "data.files=[data/*.txt]", "data.context=16"]
TEXT += ["data.cache_dir=cache"]


def errors_of_two_machines(folder: Path, *words: str) -> list[str]:
    """The errors of two processes that are refused, each in a folder of its own, with the folder of the run in common."""
    env = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = ("fit", *SHARED, *words, f"hydra.run.dir={folder / 'run'}")

    def start(rank: int) -> Forked:
        own = env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        return Forked(COMMAND_LINE, *words, folder=folder / str(rank), env=own, errors=folder / f"errors_{rank}")

    statuses = statuses_of(2, start)
    errors = [(folder / f"errors_{rank}").read_text() for rank in (0, 1)]
    assert statuses == [2, 2], errors
    return errors


def assert_refused(folder: Path, message: str, *words: str) -> None:
    """Both processes print one line, with the message, which is about rank 1."""
    for text in errors_of_two_machines(folder, *words):
        assert text.startswith("holotrain: ") and text.count("\n") == 1 and "rank 1" in text and message in text, text
    assert not (folder / "run/checkpoints").exists()


@pytest.mark.slow
def test_processes_with_different_texts_are_refused(tmp_path):
    for rank in (0, 1):
        write_letters(tmp_path / f"{rank}/data", shift=rank)
    assert_refused(tmp_path, "data: rank 1 has other data than rank 0; content of train: ", *TEXT)


def test_a_mistake_in_the_data_of_one_process_ends_both(tmp_path):
    write_letters(tmp_path / "0/data")
    (tmp_path / "1").mkdir()
    assert_refused(tmp_path, "data.files: ", *TEXT)
