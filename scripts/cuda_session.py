"""Runs everything that waits for a GPU, the most valuable first, and compares it with the goals. Needs torch and pytest alone.

    python scripts/cuda_session.py --budget 40m            # writes scripts/results/cuda/, with session.md and session.png
    python scripts/cuda_session.py --budget 40m --resume   # goes on: leaves out what is done on this machine
    python scripts/cuda_session.py --dry-run               # every piece at toy size on the CPU; its figures mean nothing

A piece (cuda_pieces.py) is one command of another script, of less than eight minutes, in a process of its own. It writes its
JSON at once. A piece that fails or runs past its limit is named with the last line of its error, and the next goes on; what it
said is in a .log file beside the JSON. No piece starts after the budget is spent. session.png needs matplotlib.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuda_pieces import PIECES, Piece

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "scripts" / "results" / "cuda"


@dataclass(frozen=True)
class Outcome:
    """How a piece ended, in words, and its seconds."""

    state: str
    seconds: float | None = None

    @property
    def failed(self) -> bool:
        return self.state.startswith("failed")


def run_all(
    pieces: Sequence[Piece],
    folder: Path,
    budget: float,
    machine: dict[str, Any],
    resume: bool = False,
    toy: bool = False,
    report: Callable[[dict[str, Outcome]], object] = lambda outcomes: None,
) -> dict[str, Outcome]:
    """Runs the pieces that are not done until ``budget`` seconds are spent; ``report`` is called after each."""
    started, outcomes = time.monotonic(), {}
    for number, piece in enumerate(pieces, 1):
        missing = [module for module in piece.needs if importlib.util.find_spec(module) is None]
        if resume and (before := done_before(piece, folder, machine, toy)) is not None:
            outcome = Outcome("done before", before)
        elif missing:
            outcome = Outcome(f"skipped: {', '.join(missing)} is not installed")
        elif time.monotonic() - started >= budget:
            outcome = Outcome("not started: the budget is spent")
        else:
            outcome = run(piece, folder, toy)
        outcomes[piece.name] = outcome
        took = "" if outcome.seconds is None else f", {outcome.seconds:.0f} s"
        print(f"{number}/{len(pieces)} {piece.name}: {outcome.state}{took}", flush=True)
        report(outcomes)
    return outcomes


def command_of(piece: Piece, toy: bool) -> list[str]:
    return [*piece.command, *(piece.toy if toy else ())]


def run(piece: Piece, folder: Path, toy: bool) -> Outcome:
    """Runs one piece; its JSON gets its command, its seconds and its failure."""
    result, log, part = (folder / f"{piece.name}{ending}" for ending in (".json", ".log", ".json.part"))
    for earlier in (result, log, part):
        earlier.unlink(missing_ok=True)
    command, started = command_of(piece, toy), time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as errors:
        whole = [sys.executable, *command, "--json", str(part)]
        # A session of its own, so that what it has started ends with it, and leaves the GPU to the next piece.
        process = subprocess.Popen(whole, cwd=ROOT, stdout=out, stderr=errors, start_new_session=True)
        failure = None
        try:
            status = process.wait(60 * piece.minutes)
        except subprocess.TimeoutExpired:
            failure = f"ran past {piece.minutes:g} minutes"
        finally:
            with suppress(ProcessLookupError):  # nobody is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        seconds = time.monotonic() - started
        said = "".join(stream.seek(0) or stream.read() for stream in (out, errors))
        last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "no output")
    if failure:
        failure += f"; last line: {last}"
    elif status != 0:
        failure = last
    elif read(part) is None:
        failure = "wrote no JSON"
    if (found := read(part)) is not None:
        found["session"] = {"command": command, "seconds": round(seconds, 1), "failure": failure}
        part.write_text(json.dumps(found, indent=2) + "\n")
        part.replace(result)
    if failure:
        part.unlink(missing_ok=True)
        log.write_text(said)
        return Outcome(f"failed: {failure}", seconds)
    return Outcome("done", seconds)


def read(path: Path) -> dict[str, Any] | None:
    """None: there is no such file, or none that a script of ours has written to its end."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def done_before(piece: Piece, folder: Path, machine: dict[str, Any], toy: bool) -> float | None:
    """Its seconds, if it was done with the same command on this machine."""
    found = read(folder / f"{piece.name}.json")
    session, where = (found or {}).get("session"), (found or {}).get("machine")
    if not (isinstance(session, dict) and session.keys() >= {"command", "seconds", "failure"} and isinstance(where, dict)):
        return None
    same = all(where.get(key) == value for key, value in machine.items() if key != "threads")  # an option of some
    return session["seconds"] if same and not session["failure"] and session["command"] == command_of(piece, toy) else None


def results_of(outcomes: dict[str, Outcome], folder: Path) -> dict[str, dict[str, Any]]:
    """The JSON of each piece that has run; what an earlier session left of the others may be of another machine."""
    ran = [name for name, outcome in outcomes.items() if outcome.seconds is not None]
    return {name: found for name in ran if (found := read(folder / f"{name}.json")) is not None}


def seconds_of(text: str) -> float:
    """Such as 40m, 90s or 1h."""
    if not (given := re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no time; give a number and s, m or h, such as 40m")
    return float(given[1]) * {"s": 1, "m": 60, "h": 3600}[given[2]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--budget",
        type=seconds_of,
        default=2400.0,
        help="no piece starts after this time, and the last may run eight minutes past it; default: 40m",
    )
    parser.add_argument("--resume", action="store_true", help="leave out pieces that are done on this machine")
    parser.add_argument("--dry-run", action="store_true", help="every piece at toy size on the CPU, in a temporary folder")
    parser.add_argument("--out", type=Path, help="folder of the results; default: scripts/results/cuda")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a piece that runs is ended, too
    if options.dry_run:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from bench_common import machine  # imports torch, which reads the variable
    from cuda_table import draw, markdown

    described = machine()
    if not (options.dry_run or described["gpu"]):
        parser.error("this machine has no CUDA device; --dry-run goes through every piece on the CPU")
    with tempfile.TemporaryDirectory() as aside:
        folder = (options.out or (Path(aside) if options.dry_run else RESULTS)).absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--out: {folder}: {error.strerror}")

        def report(outcomes: dict[str, Outcome]) -> str:
            states = {name: (outcome.state, outcome.seconds) for name, outcome in outcomes.items()}
            text = markdown(states, results_of(outcomes, folder), described, options.dry_run)
            (folder / "session.md").write_text(text)
            return text

        try:
            outcomes = run_all(PIECES, folder, options.budget, described, options.resume, options.dry_run, report)
        except KeyboardInterrupt:
            print(f"stopped; {folder} has what is done, and --resume goes on", file=sys.stderr)
            raise SystemExit(130) from None
        print(f"\n{report(outcomes)}\nwritten to {folder}")
        print(draw(results_of(outcomes, folder), folder / "session.png"))
    raise SystemExit(any(outcome.failed for outcome in outcomes.values()))


if __name__ == "__main__":
    main()
