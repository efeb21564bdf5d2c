"""scripts/cuda_session.py: how it runs its pieces, with pieces of one line of Python."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))

from cuda_pieces import Piece  # noqa: E402
from cuda_session import run_all  # noqa: E402

MACHINE = {"gpu": "a GPU", "cpu": "a CPU", "torch": "2.11", "python": "3.12", "threads": 1}
WRITES = "import json, pathlib, sys; pathlib.Path(sys.argv[-1]).write_text(json.dumps({}))"
HERE = WRITES.replace("{}", f"{{'machine': {MACHINE | {'threads': 4}}}}")


PARENT = "import subprocess; process = subprocess.Popen(['sleep', '600']); print('child', process.pid, flush=True); "


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
