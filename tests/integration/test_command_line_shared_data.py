"""Two processes whose data differ, or of which one has a mistake in its data: both say so in one line, before they train."""

import os
from pathlib import Path

import pytest
import torch.distributed
from covering import slow
from forked import COMMAND_LINE, Forked
from gloo_pair import free_port, statuses_of
from PIL import Image
from small_run import SMALL

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")

SHARED = [*SMALL, "trainer=ddp", "trainer.timeout=60", "logger=none", "callbacks.progress=null", "test=false"]
TEXT = ["task=causal_lm", "model=rev_gpt_tiny", "data=text_files", "data.files=[given/*.txt]", "data.context=16"]
TEXT += ["data.cache_dir=cache"]
IMAGES = ["data=imagefolder", "data.root=given", "model=rev_vit_tiny", "data.image_size=16", "data.batch_size=1"]
IMAGES += ["data.num_workers=0"]


def by_two_machines(folder: Path, *words: str) -> tuple[list[int], list[str]]:
    """Exit statuses and errors of two processes, each in a folder of its own, with the folder of the run in common."""
    env = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    told = [*SHARED, *words, f"hydra.run.dir={folder / 'run'}"]

    def start(rank: int) -> Forked:
        given = env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        return Forked(COMMAND_LINE, "fit", *told, folder=folder / str(rank), env=given, errors=folder / f"errors_{rank}")

    statuses = statuses_of(2, start)
    return statuses, [(folder / f"errors_{rank}").read_text() for rank in (0, 1)]


def write_texts(folder: Path, shift: int = 0, size: int = 3000) -> None:
    (folder / "given").mkdir(parents=True)
    for number in range(4):
        text = "".join(chr(97 + (i * i * (number + 3 + shift) + i // 7) % 26) for i in range(size))
        (folder / f"given/{number}.txt").write_text(text)


def write_images(folder: Path) -> None:
    for part, count in (("train", 12), ("val", 4)):
        for name in ("one", "two"):
            place = folder / "given" / part / name
            place.mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (16, 16), (number * 9, 0, 99)).save(place / f"{number:02d}.png")


def assert_said(said: tuple[list[int], list[str]], words: str) -> None:
    """Both processes end with status 2 and one line; the first one's is about the other."""
    statuses, errors = said
    assert statuses == [2, 2], said
    assert [text.count("\n") for text in errors] == [1, 1] and all(words in text for text in errors), said
    assert errors[0].startswith("holotrain: ") and "rank 1" in errors[0] and errors[1].startswith("holotrain: rank 1"), said


@pytest.mark.parametrize("unlike", ["content", slow("size")])
def test_processes_with_different_texts_are_refused(tmp_path, unlike):
    write_texts(tmp_path / "0")
    write_texts(tmp_path / "1", **({"shift": 1} if unlike == "content" else {"size": 3001}))
    what = "content of train" if unlike == "content" else "tokens of train"
    assert_said(by_two_machines(tmp_path, *TEXT), f"data: rank 1 has other data than rank 0; {what}: ")
    assert not (tmp_path / "run/checkpoints").exists()


@pytest.mark.slow
@pytest.mark.parametrize("unlike", ["an image", "a file fewer", "nothing"])
def test_processes_with_different_images_are_refused(tmp_path, unlike):
    for rank in "01":
        write_images(tmp_path / rank)
    first = tmp_path / "1/given/train/one/00.png"
    if unlike == "an image":
        Image.new("RGB", (16, 16), (1, 2, 3)).save(first)
    elif unlike == "a file fewer":
        first.unlink()
    said = by_two_machines(tmp_path, *IMAGES)
    if unlike == "nothing":
        assert said == ([0, 0], ["", ""])
    else:
        what = "content of train: " if unlike == "an image" else "samples of train: 23 in rank 1, 24 in rank 0"
        assert_said(said, f"data: rank 1 has other data than rank 0; {what}")


def test_a_mistake_in_the_data_of_one_process_ends_both(tmp_path):
    write_texts(tmp_path / "0")
    (tmp_path / "1").mkdir()
    assert_said(by_two_machines(tmp_path, *TEXT), "data.files: ")


@pytest.mark.slow
@pytest.mark.parametrize("when", ["at the start", "in training"])
def test_a_damaged_image_of_one_process_ends_both(tmp_path, when):
    """A few images are read at the start to be compared."""
    for rank in "01":
        write_images(tmp_path / rank)
    damaged = tmp_path / "1/given/train/two" / ("11.png" if when == "at the start" else "03.png")
    damaged.write_bytes(damaged.read_bytes()[:40])
    assert_said(by_two_machines(tmp_path, *IMAGES, "trainer.limit_train_batches=1.0"), f"{damaged.name}")
