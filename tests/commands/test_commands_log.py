"""log.txt: what a run has printed, in its folder."""

import io
import logging
import sys
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress
from small_run import SMALL

import holotrain as package
from holotrain.cli import Unbreakable
from holotrain.commands.log_file import logged
from holotrain.errors import UserError

QUICK = [*SMALL, "test=false", "logger=none"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "summary.json").touch()
    return tmp_path


def lines(folder: Path) -> list[str]:
    return (folder / "log.txt").read_text().splitlines()


def test_the_log_has_what_both_streams_and_logging_printed_and_the_streams_have_it_too(folder):
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger("theirs").addHandler(handler)
    with redirect_stdout(io.StringIO()) as out, logged(folder, ["fit", "model.name=a b"]):
        print("one")
        print("two", file=sys.stderr)
        logging.getLogger("theirs").warning("three")
        print("four", end="")
    assert out.getvalue() == "one\nfour" and handler.stream is sys.stderr
    start, *rest = lines(folder)
    assert start.endswith("  holotrain fit 'model.name=a b'") and rest == ["one", "two", "three", "four"]
    with logged(folder), logged(folder):
        print("five")
    assert lines(folder)[1:] == [*rest, "five"]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_that_is_drawn_again_stands_once_in_the_log(folder, terminal):
    with redirect_stdout(Terminal() if terminal else io.StringIO()) as out, logged(folder):
        with Progress(console=Console(), auto_refresh=False) as progress:
            bars = [progress.add_task(name, total=30) for name in ("first", "second")]
            for step in range(30):
                for bar in bars:
                    progress.advance(bar)
                progress.refresh()
                if step % 10 == 0:
                    print("step", step)
        for percent in range(100):  # as tqdm does
            print(f"\r{percent}% of tokens", end="")
        print()
    written = lines(folder)
    assert out.getvalue().count("first") > 30 or not terminal
    assert [line for line in written if line.startswith("step")] == ["step 0", "step 10", "step 20"]
    assert written[-1] == "99% of tokens" and not any("\x1b" in line for line in written)
    for name in ("first", "second"):
        assert [line.split()[-2] for line in written if line.startswith(name)] == ["100%"]


@pytest.mark.parametrize(
    ("error", "last"), [(UserError("lr: wrong"), "holotrain: lr: wrong"), (ZeroDivisionError("x"), "ZeroDivisionError: x")]
)
def test_the_log_ends_with_the_error(folder, error, last):
    with suppress(UserError, ZeroDivisionError), logged(folder):
        raise error
    assert lines(folder)[-1] == last
    assert ("Traceback" in lines(folder)[0]) == isinstance(error, ZeroDivisionError)


def test_of_another_process_only_the_standard_error_is_logged(folder, capsys):
    with suppress(ZeroDivisionError), logged(folder, of_main=False):
        print("one")
        print("two", file=sys.stderr)
        raise ZeroDivisionError
    assert lines(folder) == ["two"] and capsys.readouterr() == ("one\n", "two\n")


def test_a_run_that_leaves_nothing_leaves_no_log_and_no_log_ends_no_run(tmp_path):
    with logged(tmp_path):
        print("one")
        (tmp_path / ".lock").touch()
    assert not (tmp_path / "log.txt").exists()
    (tmp_path / "log.txt").mkdir()
    with logged(tmp_path):
        print("one")


def test_a_stream_whose_reader_has_left_breaks_neither_run_nor_log(folder, tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("it has no device that is always full")
    full = io.TextIOWrapper(io.BufferedWriter(Unbreakable("/dev/full", "w")), write_through=True)
    with redirect_stderr(full), logged(folder):
        print("one", file=sys.stderr, flush=True)
        assert sys.stderr.buffer.raw.error is not None
    assert lines(folder) == ["one"]


def test_a_resumed_run_appends_and_a_refused_one_does_not(holotrain):
    holotrain.done("fit", *QUICK, "hydra.run.dir=run")
    first = lines(Path("run"))
    assert "already holds a run" in holotrain.refused("fit", *QUICK, "hydra.run.dir=run")
    assert lines(Path("run")) == first
    out = holotrain.done("fit", "resume=true", "trainer.max_epochs=3", "hydra.run.dir=run")
    both = lines(Path("run"))
    assert both[: len(first)] == first and "resume=true" in both[len(first)] and both[len(first) + 1 :] == out.splitlines()
    package.fit(overrides=["resume=true", "trainer.max_epochs=4"], folder="run", quiet=True)
    assert len(lines(Path("run"))) > len(both) + 5


def test_each_job_of_a_sweep_has_a_log_with_the_traceback_of_its_defect(holotrain, monkeypatch):
    def break_down(summary, folder, expensive):
        if folder.name == "1":
            raise ZeroDivisionError("a defect")

    monkeypatch.setattr("holotrain.commands.screen.show_end", break_down)
    status, _, err = holotrain("fit", *QUICK, "optimizer.lr=1e-3,1e-4,-1", "-m", "hydra.sweep.dir=sweep")
    good, defect, mistake = (lines(Path("sweep") / number) for number in "012")
    assert status == 1 and "Traceback" in err and "Traceback" not in "".join(good + mistake)
    assert "optimizer.lr=0.0001" in defect[0] and defect.count("Traceback (most recent call last):") == 1
    assert defect[-1] == "ZeroDivisionError: a defect" and "optimizer.lr: must be at least 0" in mistake[-1]
