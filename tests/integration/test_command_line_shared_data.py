"""Two processes whose data differ, or of which one has a mistake in its data: both end with one line, before they train."""

import os
from pathlib import Path

import pytest
import torch.distributed
from forked import COMMAND_LINE, Forked
from gloo_pair import free_port, statuses_of
from PIL import Image
from small_run import SMALL

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")

SHARED = [*SMALL, "trainer=ddp", "trainer.timeout=60", "logger=none", "callbacks.progress=null", "test=false"]
TEXT = ["task=causal_lm", "model=rev_gpt_tiny", "data=text_files", "data.files=[data/*.txt]", "data.context=16"]
TEXT += ["data.cache_dir=cache"]
IMAGES = ["data=imagefolder", "data.root=data", "model=rev_vit_tiny", "data.image_size=16", "data.batch_size=1"]
IMAGES += ["data.num_workers=0", "trainer.limit_train_batches=1.0"]


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


def write_texts(folder: Path, shift: int = 0) -> None:
    (folder / "data").mkdir(parents=True)
    for number in range(4):
        text = "".join(chr(97 + (i * i * (number + 3 + shift) + i // 7) % 26) for i in range(3000))
        (folder / f"data/{number}.txt").write_text(text)


def write_images(folder: Path) -> None:
    for part, count in (("train", 12), ("val", 4)):
        for name in ("one", "two"):
            place = folder / "data" / part / name
            place.mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (16, 16), (number * 9, 0, 99)).save(place / f"{number:02d}.png")


def assert_refused(folder: Path, message: str, *words: str) -> None:
    """Both processes print one line, with the message, which is about rank 1."""
    for text in errors_of_two_machines(folder, *words):
        assert text.startswith("holotrain: ") and text.count("\n") == 1 and "rank 1" in text and message in text, text
    assert not (folder / "run/checkpoints").exists()


@pytest.mark.slow
def test_processes_with_different_texts_are_refused(tmp_path):
    for rank in (0, 1):
        write_texts(tmp_path / str(rank), shift=rank)
    assert_refused(tmp_path, "data: rank 1 has other data than rank 0; content of train: ", *TEXT)


def test_a_mistake_in_the_data_of_one_process_ends_both(tmp_path):
    write_texts(tmp_path / "0")
    (tmp_path / "1").mkdir()
    assert_refused(tmp_path, "data.files: ", *TEXT)


@pytest.mark.slow
def test_processes_with_different_images_are_refused(tmp_path):
    for rank in "01":
        write_images(tmp_path / rank)
    (tmp_path / "1/data/train/one/00.png").unlink()
    assert_refused(tmp_path, "data: rank 1 has other data than rank 0; samples of train: 23 in rank 1, 24 in rank 0", *IMAGES)
