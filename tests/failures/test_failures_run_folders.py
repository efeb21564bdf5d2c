"""The folder of a run that somebody else has filled: nothing outside of it is read or written, and no command hangs."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from covering import slow
from small_run import SMALL

from holotrain.errors import UserError

pytestmark = pytest.mark.usefixtures("contacts_nobody")

CONTINUED = ["fit", *SMALL, "resume=true", "hydra.run.dir=run", "trainer.max_epochs=3", "profiler=simple"]


@pytest.fixture
def crafted(holotrain, image_run, monkeypatch):
    """Puts a link or a pipe at a place in the folder of a run, and gives the command line."""
    shutil.copytree(image_run, "run")
    Path("outside").mkdir()
    Path("outside/file").write_text("precious")

    def put(place: str, to: str):
        path = Path("run", place)
        path.parent.mkdir(exist_ok=True, parents=True)
        if path.exists():
            path.rename(f"outside/{path.name}")
        os.mkfifo(path) if to == "pipe" else path.symlink_to(Path(to).absolute())
        return holotrain

    return put


def outside() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path("outside").rglob("*") if path.is_file()}


PLACES = [
    (".lock", "outside/file"), slow(".lock", "outside/made"), slow(".lock", "pipe"), ("checkpoints", "outside/checkpoints"),
    slow("checkpoints/last.ckpt", "outside/last.ckpt"), slow("checkpoints/.last.ckpt.partial", "outside"),
    slow("checkpoints/.last.ckpt.file", "outside/file"), slow("checkpoints/best-epoch9-step9.ckpt", "pipe"),
    slow("tensorboard", "outside"), slow("tensorboard/hparams.yaml", "outside/file"), slow("csv/version_0", "outside"),
    slow("fit-profile.txt", "outside/file"), slow("fit-profile.txt", "/dev/zero"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "to"), PLACES)
def test_a_run_is_not_continued_where_it_would_write_elsewhere(crafted, place, to):
    typed = crafted(place, to)
    before = outside()
    line = typed.refused(*CONTINUED)
    assert f"run/{place} is {'no regular file' if to == 'pipe' else 'a link'}" in line
    assert outside() == before and not Path("outside/made").exists()


@pytest.mark.parametrize("place", ["multirun.yaml", "0", slow("1")])
def test_a_sweep_is_not_started_where_it_would_write_elsewhere(crafted, place):
    to = "outside/file" if place == "multirun.yaml" else "outside"
    line = crafted(place, to).refused("fit", *SMALL, "-m", "seed=1,2", "hydra.sweep.dir=run", "logger=none")
    assert f"run/{place} is a link" in line and outside() == {"outside/file": b"precious"}


def test_links_in_the_place_of_files_that_are_replaced_are_replaced(crafted):
    typed = crafted("config.yaml", "outside/file")
    before = outside()
    # Earlier versions wrote to this name, before they renamed it.
    Path(f"run/.config.yaml.{os.getpid()}").symlink_to(Path("outside/file").absolute())
    typed.done(*CONTINUED)
    assert outside() == before and not Path("run/config.yaml").is_symlink()


def test_what_a_killed_process_has_left_beside_a_checkpoint_goes(holotrain, tmp_path):
    from holotrain.files import replacing

    Path("outside").write_text("precious")
    Path(".a.ckpt.0123456789abcdef").write_text("half")
    Path(".a.ckpt.00000000000000ff").symlink_to("outside")
    kept = [".a.ckpt.partial", ".aXckpt.0123456789abcdef", ".b.ckpt.0123456789abcdef"]
    for name in kept:
        Path(name).touch()
    with replacing(tmp_path / "a.ckpt", alone=True) as temporary:
        temporary.write_text("whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, "a.ckpt", "outside"])
    assert Path("a.ckpt").read_text() == "whole" and Path("outside").read_text() == "precious"


READ = [
    ("tensorboard/events.out.tfevents.1", "/dev/zero"), ("tensorboard/events.out.tfevents.1", "pipe"),
    ("csv/version_0/metrics.csv", "pipe"), slow("csv/version_0/metrics.csv", "/dev/zero"),
    ("config.yaml", "outside/secret.yaml"), slow("config.yaml", "pipe"), slow("summary.json", "pipe"),
    slow("tensorboard", "outside"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "to"), READ)
def test_a_report_reads_only_what_is_in_the_folder_of_a_run(crafted, place, to):
    Path("outside/secret.yaml").write_text(yaml.safe_dump({"password": "opensesame"}))
    typed = crafted(place, to)
    assert f"run/{place} is {'no regular file' if to == 'pipe' else 'a link'}" in typed.refused("report", "run")
    assert not Path("report.html").exists()


@pytest.mark.parametrize("path", ["pipe", "/dev/zero"])
def test_prompts_are_read_from_a_regular_file(tmp_path, path):
    from holotrain.commands.generate import prompts

    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="it is no regular file"):
        prompts(SimpleNamespace(prompt=None, prompts=str(tmp_path / path)))
