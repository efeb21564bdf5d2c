"""The folder of a run that somebody else has filled: nothing outside of it is read or written, and no command hangs."""

import os
import shutil
import warnings
from pathlib import Path

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from small_run import SMALL

from holotrain.callbacks.monitors import log_text
from holotrain.commands import screen
from holotrain.commands.generate import Shown
from holotrain.data.tokenizers import ByteTokenizer

pytestmark = pytest.mark.usefixtures("contacts_nobody")

CONTINUED = ["fit", *SMALL, "resume=true", "hydra.run.dir=run", "trainer.max_epochs=3", "profiler=trace"]


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
    ("log.txt", "outside/file"),
    ("checkpoints", "outside/checkpoints"), ("checkpoints/last.ckpt", "outside/last.ckpt"),
    ("checkpoints/best-epoch9-step9.ckpt", "pipe"), ("tensorboard", "outside"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "to"), PLACES)
def test_a_run_is_not_continued_where_it_would_write_elsewhere(crafted, place, to):
    typed = crafted(place, to)
    before = outside()
    line = typed.refused(*CONTINUED)
    assert f"run/{place} is {'no regular file' if to == 'pipe' else 'a link'}" in line
    assert outside() == before and not Path("outside/made").exists()


def test_a_hard_link_is_not_written_through(holotrain, image_run):
    shutil.copytree(image_run, "run")
    os.link("run/log.txt", "precious")
    before = Path("precious").read_bytes()
    assert "run/log.txt has another name elsewhere" in holotrain.refused(*CONTINUED)
    assert Path("precious").read_bytes() == before


def test_names_that_control_a_terminal_are_escaped_on_the_screen(holotrain, image_run):
    shutil.copytree(image_run, "run\x1b[2J")
    words = ["test", "ckpt_path=run\x1b[2J/checkpoints/last.ckpt"]
    status, out, err = holotrain(*words)
    assert status == 0 and "\\x1b[2J" in out and "\x1b[2J" not in out + err


def test_texts_that_control_a_terminal_are_escaped_wherever_they_are_read(tmp_path, capsys):
    """On the console, in tables, warnings and texts of TensorBoard; tabs and lines stay."""
    text, escaped = "a\tb\nc\x1b[2J\u202e", "c\\x1b[2J\\u202e"
    screen.plain(width=80).print(text)
    screen.show(text, {text: "", "choice": text, "lines": [text, text]})
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\u202e" not in out and out.count(escaped) == 6 and "b\nc" in out
    with screen.quietly():
        assert warnings.formatwarning(text, UserWarning, "", 0) == f"warning: a\\tb\\n{escaped}\n"
    logger = TensorBoardLogger(tmp_path)
    log_text([logger], "text", text, step=0)
    logger.experiment.flush()
    (event,) = Path(logger.log_dir).glob("events*")
    assert escaped.encode() in event.read_bytes() and b"\x1b[2J" not in event.read_bytes()


def test_a_text_is_shown_as_it_is_generated_with_the_lines_of_windows_and_marks_of_hebrew(capsys):
    shown = Shown(ByteTokenizer(), "a\r\n")
    for number in "\u05d0!\u200f\r\nb\r\x1b".encode():
        shown.add(number)
    shown.add()
    assert capsys.readouterr().out == "a\r\n\u05d0!\u200f\r\nb\\r\\x1b\n"


def test_links_in_the_place_of_files_that_are_replaced_are_replaced(crafted):
    typed = crafted("config.yaml", "outside/file")
    before = outside()
    # Earlier versions wrote to this name, before they renamed it.
    Path(f"run/.config.yaml.{os.getpid()}").symlink_to(Path("outside/file").absolute())
    assert typed(*CONTINUED)[0] == 0  # the profiler may say something
    assert outside() == before and not Path("run/config.yaml").is_symlink()


def test_what_a_killed_process_has_left_beside_a_checkpoint_goes(holotrain, tmp_path):
    from holotrain.files import replacing

    Path("outside").write_text("precious")
    Path(".a.ckpt.new").symlink_to("outside")
    with replacing(tmp_path / "a.ckpt", alone=True) as temporary:
        temporary.write_text("whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ckpt", "outside"]
    assert Path("a.ckpt").read_text() == "whole" and Path("outside").read_text() == "precious"


@pytest.mark.parametrize("place", ["pipe", "stdout"])
@pytest.mark.parametrize(
    "words", [["plan", *SMALL, "json="], ["export", "ckpt_path=image.ckpt", "to="]], ids=lambda words: words[0]
)
def test_no_pipe_and_no_device_is_written_or_replaced(holotrain, image_run, words, place):
    shutil.copy(image_run / "checkpoints/last.ckpt", "image.ckpt")
    os.mkfifo("pipe")
    Path("stdout").symlink_to("/proc/self/fd/1")  # as /dev/stdout
    assert f"{words[-1][:-1]}: {place} is no regular file" in holotrain.refused(*words[:-1], words[-1] + place)
    assert Path("pipe").is_fifo() and Path("stdout").is_symlink() and not [*Path("runs").rglob("*.json")]


def test_an_export_is_not_written_through_links(holotrain, image_run):
    Path("out").mkdir()
    Path("out/config.json").symlink_to(Path("precious").absolute())
    assert "out/config.json is a link" in holotrain.refused("export", f"ckpt_path={image_run}", "to=out")
    assert not Path("precious").exists()
