"""Runs what waits for a GPU, the most valuable first, within a quarter of an hour on a machine where nothing can be installed.

    python scripts/cuda_session.py                                     # goes on where it was ended, SIGKILL included
    python scripts/cuda_session.py --budget 590s --archive "$OUT/session.tar.gz"
    python scripts/cuda_session.py --again                             # starts anew
    python scripts/cuda_session.py --dry-run --out runs/dry_session    # at toy size on the CPU; its figures mean nothing

A piece (cuda_pieces.py) is one command of another script, in a process of its own that is ended after some seconds. It writes
its JSON at once, and says each figure beside the number that was expected of it. After each piece one archive of all results
and of the ends of their logs is written anew. A piece that fails is named, and tried again after all others. None starts that
might run past the budget. Wheels in wheels/ (carried_wheels.py) are used where their package is not installed.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carried_wheels import WHEELS, unpack
from cuda_pieces import PIECES, Piece

ROOT = Path(__file__).parents[1]
MOST_BYTES = 2**24
"""Of the archive."""

LOG_BYTES = 2**16
"""Of the end of a log that is kept."""

TOY_SECONDS = 20
"""Of a piece at toy size, about."""

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Outcome:
    """How a piece ended, in words, and its seconds."""

    state: str
    seconds: float | None = None


class Session:
    """
    Args:
        folder: of the results.
        machine: as bench_common.machine() describes it; results of another one do not count.
        toy: whether pieces run at toy size.
    """

    def __init__(
        self, pieces: Sequence[Piece], folder: Path, archive: Path, machine: dict[str, Any], toy: bool = False
    ) -> None:
        self.pieces, self.folder, self.archive, self.machine, self.toy = pieces, folder, archive, machine, toy
        self.outcomes: dict[str, Outcome] = {}

    def forget(self) -> None:
        """Removes results, so that the session starts anew."""
        for piece in self.pieces:
            self.result_of(piece).unlink(missing_ok=True)

    def run(self, budget: float) -> bool:
        """Runs pieces that are not done while ``budget`` seconds last. Returns whether none failed."""
        started = time.monotonic()
        before = {piece.name: self.outcome_before(piece) for piece in self.pieces}
        for piece in sorted(self.pieces, key=lambda piece: "failed" in before[piece.name].state):
            left = budget - (time.monotonic() - started)
            missing = [module for module in piece.needs if importlib.util.find_spec(module) is None]
            if before[piece.name].state == "done":
                outcome = before[piece.name]
            elif missing:
                outcome = Outcome(f"skipped: {', '.join(missing)} is not installed")
            elif left < (TOY_SECONDS if self.toy else piece.seconds):
                outcome = Outcome(f"not started: {max(left, 0):.0f} s are left")
            else:
                outcome = self.run_piece(piece)
            self.outcomes[piece.name] = outcome
            took = "" if outcome.seconds is None else f", {outcome.seconds:.0f} s"
            lines = "".join(f"\n  {in_words(row)}" for row in self.verdicts(piece))
            print(f"{len(self.outcomes)}/{len(self.pieces)} {piece.name}: {outcome.state}{took}{lines}", flush=True)
            if outcome is not before[piece.name]:
                self.report()
        self.report()
        return not any(outcome.state.startswith("failed") for outcome in self.outcomes.values())

    def run_piece(self, piece: Piece) -> Outcome:
        """Runs one piece. Its JSON gets its command, its seconds and its failure."""
        result, part = self.result_of(piece), self.folder / f"{piece.name}.json.part"
        part.unlink(missing_ok=True)
        started = time.monotonic()
        with tempfile.TemporaryFile() as said:
            failure = self.wait_for([sys.executable, *self.command_of(piece), "--json", str(part)], self.limit_of(piece), said)
            seconds = time.monotonic() - started
            said.seek(max(said.tell() - LOG_BYTES, 0))
            log = said.read()
        lines = log.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        found = read(part)
        if failure is not None:
            failure = f"{failure}; last line: {last}" if failure else last
        elif found is None:
            failure = "wrote no JSON"
        session = {"command": self.command_of(piece), "seconds": round(seconds, 1), "failure": failure}
        (self.folder / f"{piece.name}.log").write_bytes(log)
        part.write_text(json.dumps({"machine": self.machine} | (found or {}) | {"session": session}, indent=2) + "\n")
        part.replace(result)
        return Outcome(f"failed: {failure}" if failure else "done", seconds)

    def wait_for(self, command: list[str], seconds: float, said) -> str | None:
        """Runs a command. Returns None, or how it failed in words; an empty text: by its exit status."""
        # A process group of its own, so that what it has started ends with it, and leaves the GPU to the next piece.
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=said, stderr=said, start_new_session=True, preexec_fn=end_with_the_session
        )
        try:
            return None if process.wait(seconds) == 0 else ""
        except subprocess.TimeoutExpired:
            return f"ran past {seconds:g} s"
        finally:
            with suppress(ProcessLookupError):  # nobody is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            said.seek(0, os.SEEK_END)

    def limit_of(self, piece: Piece) -> float:
        """Seconds; in a dry run more, for a CPU that others use, too."""
        return piece.seconds * (4 if self.toy else 1)

    def command_of(self, piece: Piece) -> list[str]:
        return [*piece.command, *(piece.toy if self.toy else ())]

    def result_of(self, piece: Piece) -> Path:
        return self.folder / f"{piece.name}.json"

    def outcome_before(self, piece: Piece) -> Outcome:
        """How it ended with the same command on this machine."""
        found = read(self.result_of(piece)) or {}
        session, where = found.get("session"), found.get("machine")
        if not (isinstance(session, dict) and session.keys() >= {"command", "seconds", "failure"} and isinstance(where, dict)):
            return Outcome("not started")
        same = all(where.get(key) == value for key, value in self.machine.items() if key != "threads")  # an option of some
        if not same or session["command"] != self.command_of(piece):
            return Outcome("not started")
        return Outcome("failed" if session["failure"] else "done", session["seconds"])

    def verdicts(self, piece: Piece) -> list[dict[str, Any]]:
        """What it found beside what was expected, if it ran."""
        ran = piece.name in self.outcomes and self.outcomes[piece.name].seconds is not None
        return (read(self.result_of(piece)) or {}).get("verdicts", []) if ran else []

    def report(self) -> None:
        """Writes session.md and the archive."""
        title = "Dry run on a CPU: these figures mean nothing" if self.toy else "Measured on a GPU"
        where = f"{self.machine['gpu'] or self.machine['cpu']}, torch {self.machine['torch']}, Python {self.machine['python']}"
        rows = [["piece", "", "seconds"], ["---"] * 3]
        for name, outcome in self.outcomes.items():
            rows.append([name, outcome.state.replace("|", "\\|"), "" if outcome.seconds is None else f"{outcome.seconds:.0f}"])
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        said = [f"- {piece.name}: {in_words(row)}" for piece in self.pieces for row in self.verdicts(piece)]
        text = "\n".join([f"# {title}", "", f"{where}.", "", *said, "", *lines])
        (self.folder / "session.md").write_text(text + "\n")
        pack(self.folder, self.archive)


def in_words(verdict: dict[str, Any]) -> str:
    """Such as ``step time over checkpointing: expected at most 1.06, found 1.31: NOT AS EXPECTED``."""
    ending = "" if verdict["as_expected"] else ": NOT AS EXPECTED"
    return f"{verdict['what']}: expected {verdict['expected']}, found {verdict['found']:.4g}{ending}"


def pack(folder: Path, archive: Path, most: int = MOST_BYTES) -> None:
    """Writes the results and logs as one .tar.gz of at most so many bytes, and never half of it. The largest files that would
    not fit uncompressed are left out."""
    files = [path for path in folder.iterdir() if path.suffix in (".json", ".log", ".md")]
    part, left = archive.with_name(f"{archive.name}.part"), most - 2**14
    with tarfile.open(part, "w:gz") as packed:
        for path in sorted(files, key=lambda path: path.stat().st_size):
            left -= path.stat().st_size + 2**10  # its header, and up to a whole block
            if left < 0:
                print(f"{path.name} is not in the archive, which is full", flush=True)
            else:
                packed.add(path, path.name)
    part.replace(archive)


def read(path: Path) -> dict[str, Any] | None:
    """None: there is no such file, or none that a script of ours has written to its end."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def end_with_the_session() -> None:
    """In a piece's process: it is killed when the session is. What it has started in turn ends with its pipes."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def seconds_of(text: str) -> float:
    """Such as 15m, 90s or 1h."""
    if not (given := re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no time; give a number and s, m or h, such as 15m")
    return float(given[1]) * {"s": 1, "m": 60, "h": 3600}[given[2]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=seconds_of, default=900.0, help="of this command; default: 15m")
    parser.add_argument("--again", action="store_true", help="also what is done on this machine")
    parser.add_argument("--dry-run", action="store_true", help="every piece at toy size on the CPU")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "cuda_session", help="folder of the results")
    parser.add_argument("--archive", type=Path, help="default: session.tar.gz in the folder of the results")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a piece that runs is ended, too
    if options.dry_run:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as carried:
        if WHEELS.is_dir():
            unpack(WHEELS, Path(carried))
            sys.path.append(carried)
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), carried)))
        from bench_common import machine  # imports torch, which reads the variable

        described = machine()
        if not (options.dry_run or described["gpu"]):
            parser.error("this machine has no CUDA device; --dry-run goes through every piece on the CPU")
        folder = options.out.absolute()
        archive = (options.archive or folder / "session.tar.gz").absolute()
        try:
            for each in (folder, archive.parent):
                each.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"{error.filename}: {error.strerror}")
        session = Session(PIECES, folder, archive, described, options.dry_run)
        if options.again:
            session.forget()
        try:
            worked = session.run(options.budget)
        except KeyboardInterrupt:
            print(f"stopped; {folder} has what is done, and the same command goes on", file=sys.stderr)
            raise SystemExit(130) from None
        print(f"written to {folder} and {archive}")
    raise SystemExit(not worked)


if __name__ == "__main__":
    main()
