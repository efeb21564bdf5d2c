"""scripts/cuda_session.py: what its pieces declare, and how it runs them, with pieces of one line of Python."""

import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))

from bench_common import NOTHING_FITS  # noqa: E402
from cuda_pieces import MOST_MINUTES, PIECES, Piece  # noqa: E402
from cuda_session import run_all  # noqa: E402
from cuda_table import goals, markdown  # noqa: E402

MACHINE = {"gpu": "a GPU", "cpu": "a CPU", "torch": "2.11", "python": "3.12", "threads": 1}
WRITES = "import json, pathlib, sys; pathlib.Path(sys.argv[-1]).write_text(json.dumps({}))"
HERE = WRITES.replace("{}", f"{{'machine': {MACHINE | {'threads': 4}}}}")


PARENT = "import subprocess; process = subprocess.Popen(['sleep', '600']); print('child', process.pid, flush=True); "


def test_pieces_are_scripts_with_names_of_their_own_and_end_in_time():
    assert len({piece.name for piece in PIECES}) == len(PIECES)
    for piece in PIECES:
        assert (ROOT / piece.command[0]).is_file()
        assert 0 < piece.minutes < MOST_MINUTES


def test_what_fails_is_named_and_the_next_goes_on_and_a_resumed_session_leaves_out_what_is_done(tmp_path):
    pieces = [
        Piece("good", ("-c", HERE)),
        Piece("bad", ("-c", f"{HERE}; raise ValueError('no such\\nbatch')")),
        Piece("mute", ("-c", "pass")),
        Piece("slow", ("-c", f"{PARENT}process.wait()"), minutes=1 / 60),
        Piece("careless", ("-c", f"{HERE}; {PARENT}sys.exit(1)")),
        Piece("lacking", ("-c", HERE), needs=("a_library_of_nobody",)),
        Piece("last", ("-c", HERE), toy=("small",)),
    ]

    def states(**options):
        outcomes = run_all(pieces, tmp_path, budget=100, machine=MACHINE, **options)
        return {name: re.sub(r"\d+$", "...", outcome.state) for name, outcome in outcomes.items()}

    failed = {"bad": "failed: batch", "mute": "failed: wrote no JSON", "careless": "failed: child ..."}
    failed |= {"slow": f"failed: ran past {1 / 60:g} minutes; last line: child ..."}
    failed |= {"lacking": "skipped: a_library_of_nobody is not installed"}
    assert states() == failed | {"good": "done", "last": "done"}
    assert "ValueError: no such" in (tmp_path / "bad.log").read_text()
    for piece in ("slow", "careless"):
        assert ended(int((tmp_path / f"{piece}.log").read_text().split()[1]))
    assert json.loads((tmp_path / "last.json").read_text())["session"]["command"] == ["-c", HERE]
    del pieces[2:4]
    failed = {name: state for name, state in failed.items() if name not in ("mute", "slow")}
    assert states(resume=True) == failed | {"good": "done before", "last": "done before"}
    assert states(resume=True, toy=True) == failed | {"good": "done before", "last": "done"}  # another command
    other = json.loads((tmp_path / "good.json").read_text())
    (tmp_path / "good.json").write_text(json.dumps(other | {"machine": MACHINE | {"gpu": "another"}}))
    assert states(resume=True)["good"] == "done"


def ended(process: int, seconds: float = 10) -> bool:
    """Whether the process ends within that time; one that nobody has waited for counts as ended."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True).stdout
        if not state.strip() or state.startswith("Z"):
            return True
        time.sleep(0.05)
    return False


def row(speed, over=1.0, **memory):
    return {"samples_per_second": speed, "throughput_over_autograd": over, **memory}


RESULTS = {
    "equal_batch_vit": {
        "options": {"batch": 4},
        "left_out": {"revlib": "ModuleNotFoundError: No module named 'revlib'"},
        "engines": {"autograd": row(10.0, peak=100, reserved=110), "pareprop": row(8.0, 0.8, peak=40, reserved=44)},
    },
    "largest_batch_16_40_gib_vit": {
        "budgets": {
            "16 GiB": {"engines": {"autograd": row(10.0), "pareprop": row(12.0), "auto": row(16.0)}, "left_out": {}},
            "24 GiB": {"engines": {"reversible": row(3.0)}, "left_out": {"autograd": "RuntimeError: no kernel"}},
            "40 GiB": {"engines": {"reversible": row(3.0)}, "left_out": {"autograd": f"OutOfMemoryError: {NOTHING_FITS}"}},
        }
    },
}


def test_results_are_compared_with_the_goals():
    found = {(goal.what, goal.where): (pytest.approx(goal.figure, nan_ok=True), goal.reached) for goal in goals(RESULTS)}
    assert found == {
        ("overlapped / plain, equal batch", "vit"): (0.8, False),
        ("reserved / allocated", "vit, pareprop"): (1.1, True),
        ("largest batch: ours / plain", "vit, 16 GiB"): (1.6, True),
        ("largest batch: ours / plain", "vit, 24 GiB"): (math.nan, False),
        ("largest batch: ours / plain", "vit, 40 GiB"): (float("inf"), True),
    }
    text = markdown({"synthesis": ("failed: batch", 3.0)}, RESULTS, MACHINE, dry=False)
    assert "| overlapped / plain, equal batch | vit | 0.8 | at least 0.85 | **no** |" in text


@pytest.mark.slow
def test_torch_and_pytest_are_all_that_it_needs():
    script = Path(__file__).with_name("with_torch_and_pytest_alone.py")
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "left out: test_callbacks_measuring.py test_callbacks_trace.py" in run.stdout
    for module in ("gradients", "graphs", "overlap", "rule", "signals", "text", "devices"):
        assert f"_{module}.py: " in run.stdout
