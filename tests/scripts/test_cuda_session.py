"""scripts/cuda_session.py: what its pieces declare, and how it runs them, with pieces of one line of Python."""

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))

from bench_common import verdict  # noqa: E402
from cuda_pieces import PIECES, QUARTER, Piece  # noqa: E402
from cuda_session import Session  # noqa: E402

MACHINE = {"gpu": "a GPU", "cpu": "a CPU", "torch": "2.11", "python": "3.12", "threads": 1}
VERDICTS: dict = {}
verdict(VERDICTS, "ratio", 1.31, 1.06)
FOUND = {"machine": MACHINE | {"threads": 4}} | VERDICTS
HERE = f"import json, pathlib, sys; pathlib.Path(sys.argv[-1]).write_text(json.dumps({FOUND}))"
PARENT = "import subprocess; process = subprocess.Popen(['sleep', '600']); print('child', process.pid, flush=True); "


def test_pieces_are_scripts_with_names_of_their_own_and_the_first_fit_into_a_quarter_of_an_hour():
    assert len({piece.name for piece in PIECES}) == len(PIECES)
    assert PIECES[: len(QUARTER)] == QUARTER and sum(piece.seconds for piece in QUARTER) <= 600  # others go to starting
    for piece in PIECES:
        assert (ROOT / piece.command[0]).is_file() and 0 < piece.seconds <= 300


def test_what_fails_is_named_and_tried_again_after_all_others(tmp_path, capsys):
    pieces = [
        Piece("bad", ("-c", f"{HERE}; raise ValueError('no such\\nbatch')"), seconds=20),
        Piece("good", ("-c", HERE), seconds=20),
        Piece("mute", ("-c", "pass"), seconds=20),
        Piece("slow", ("-c", f"{PARENT}process.wait()"), seconds=1),
        Piece("careless", ("-c", f"{HERE}; {PARENT}sys.exit(1)"), seconds=20),
        Piece("lacking", ("-c", HERE), needs=("a_library_of_nobody",)),
        Piece("long", ("-c", HERE), seconds=100),
        Piece("last", ("-c", HERE), toy=("small",), seconds=20),
    ]

    def states(budget=60, **options):
        session = Session(pieces, tmp_path, tmp_path / "all.tar.gz", MACHINE, **options)
        session.run(budget)
        return {name: re.sub(r"\d+( s are left)?$", "...", outcome.state) for name, outcome in session.outcomes.items()}

    failed = {"bad": "failed: batch", "mute": "failed: wrote no JSON", "careless": "failed: child ..."}
    failed |= {"slow": "failed: ran past 1 s; last line: child ..."}
    others = {"lacking": "skipped: a_library_of_nobody is not installed", "long": "not started: ..."}
    found = states()
    assert found == failed | others | {"good": "done", "last": "done"}
    assert "ValueError: no such" in (tmp_path / "bad.log").read_text()
    assert "\n  ratio: expected at most 1.06, found 1.31: NOT AS EXPECTED\n" in capsys.readouterr().out
    assert "- good: ratio: expected at most 1.06, found 1.31: NOT AS EXPECTED\n" in (tmp_path / "session.md").read_text()
    for piece in ("slow", "careless"):
        assert ended(int((tmp_path / f"{piece}.log").read_text().split()[1]))
    assert json.loads((tmp_path / "last.json").read_text())["session"]["command"] == ["-c", HERE]
    del pieces[2:5], failed["mute"], failed["slow"], failed["careless"]
    before = (tmp_path / "good.json").stat().st_mtime_ns
    assert list(states()) == ["good", "lacking", "long", "last", "bad"]
    assert (tmp_path / "good.json").stat().st_mtime_ns == before
    assert states(toy=True) == failed | others | {"good": "done", "last": "done"}
    assert json.loads((tmp_path / "last.json").read_text())["session"]["command"] == ["-c", HERE, "small"]
    (tmp_path / "good.json").write_text(json.dumps(FOUND | {"machine": MACHINE | {"gpu": "another"}}))
    assert states(budget=0)["good"] == "not started: ..."


KILLED = """
import sys
from pathlib import Path
sys.path.append({scripts!r})
from cuda_pieces import Piece
from cuda_session import Session
pieces = [Piece("first", ("-c", {here!r})), Piece("second", ("-c", {second!r})), Piece("third", ("-c", {here!r}))]
folder = Path({folder!r})
Session(pieces, folder, folder / "all.tar.gz", {machine!r}).run(1000)
"""


def test_a_session_that_is_killed_leaves_an_archive_of_what_is_done_and_goes_on(tmp_path):
    process = tmp_path / "pid"
    once = f"import os, pathlib, time; path = pathlib.Path({str(process)!r})"
    once += "; path.exists() or (path.write_text(str(os.getpid())), time.sleep(600))"
    values = {"scripts": str(ROOT / "scripts"), "here": HERE, "folder": str(tmp_path), "machine": MACHINE}
    command = [sys.executable, "-c", KILLED.format(**values, second=f"{once}; {HERE}")]
    session = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not (process.is_file() and process.read_text()) and time.monotonic() < until:
        time.sleep(0.05)
    session.send_signal(signal.SIGKILL)
    session.wait()
    assert ended(int(process.read_text()))  # nobody keeps the GPU
    assert "first.json" in names_in(tmp_path / "all.tar.gz")
    assert "second.json" not in names_in(tmp_path / "all.tar.gz")
    before = (tmp_path / "first.json").stat().st_mtime_ns
    assert subprocess.run(command, stdout=subprocess.DEVNULL, timeout=60).returncode == 0
    assert {"first.json", "second.json", "third.json", "session.md"} <= names_in(tmp_path / "all.tar.gz")
    assert (tmp_path / "first.json").stat().st_mtime_ns == before


def names_in(archive: Path) -> set[str]:
    with tarfile.open(archive) as packed:
        return set(packed.getnames())


def ended(process: int, seconds: float = 10) -> bool:
    """Whether the process ends within that time; one that nobody has waited for counts as ended."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True).stdout
        if not state.strip() or state.startswith("Z"):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.long
def test_a_dry_run_goes_through_all_pieces_of_a_quarter_of_an_hour(tmp_path):
    command = [sys.executable, ROOT / "scripts" / "cuda_session.py", "--dry-run", "--out", tmp_path]
    run = subprocess.run(command, capture_output=True, text=True, timeout=1000)
    for piece in QUARTER:
        assert f" {piece.name}: done, " in run.stdout
    assert {f"{piece.name}.json" for piece in QUARTER} <= names_in(tmp_path / "session.tar.gz")


@pytest.mark.slow
def test_torch_and_pytest_are_all_that_most_pieces_need():
    script = Path(__file__).with_name("with_torch_and_pytest_alone.py")
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "left out: test_callbacks_measuring.py test_callbacks_trace.py" in run.stdout
    for module in ("gradients", "graphs", "overlap", "rule", "signals", "text", "hook"):
        assert f"_{module}.py: " in run.stdout
