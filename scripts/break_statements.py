"""Does a test notice when a statement of ``results/methods.md`` becomes false?

    python scripts/break_statements.py [--only TEXT]

Each breakage of ``breakages.yaml`` makes one statement false in a copy of the repository. Then the tests that its row names
run, and one of them should fail. As the code is, all must pass. Long tests are left out; those for a GPU skip without one.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "scripts/results/methods.md"
PYTEST = [sys.executable, "-m", "pytest", "-m", "not long", "-x", "-n", "0", "-p", "no:randomly"]


def rows() -> dict[str, tuple[str, str]]:
    """The statements of the page, each with the cells *where* and *checked by*."""
    cells = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if re.match(r"\| (?!statement \|)", line)]
    return {statement: (where, checked) for statement, where, checked in cells}


def links(cell: str) -> list[tuple[str, Path]]:
    """What a cell names, and the files."""
    return [(name, (PAGE.parent / path).resolve()) for name, path in re.findall(r"\[(\w+)(?:\.py)?\]\((\S+)\)", cell)]


def breakages() -> list[dict[str, str]]:
    """Each with its ``row`` (a part of one statement), ``file``, ``old`` text and ``new`` text."""
    return yaml.safe_load((ROOT / "scripts/breakages.yaml").read_text())


def statement_of(breakage: dict[str, str]) -> str:
    (found,) = [statement for statement in rows() if breakage["row"] in statement]
    return found


def broken(breakage: dict[str, str], text: str) -> str:
    """The text of the file with the breakage."""
    count = text.count(breakage["old"])
    assert count == 1, f"{breakage['file']} has this {count} times: {breakage['old']}"
    return text.replace(breakage["old"], breakage["new"])


def tests_of(statement: str) -> list[str]:
    """As pytest names them, with the class that they are in."""
    tests = []
    for name, path in links(rows()[statement][1]):
        classes = re.findall(rf"^class (\w+)(?:(?!^\w).)*?^    def {name}\b", path.read_text(), re.M | re.S)
        tests += ["::".join([str(path.relative_to(ROOT)), *classes, name])] if name.startswith("test_") else []
    return tests


def run(tests: list[str], copy: Path) -> tuple[int, str]:
    """The exit status of pytest, and the line that says most."""
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}  # old bytecode would run
    ran = subprocess.run([*PYTEST, *tests], cwd=copy, env=environment, capture_output=True, text=True)
    lines = ran.stdout.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return ran.returncode, (failed or lines or [ran.stderr])[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose statement contains this")
    only = parser.parse_args().only
    chosen, noticed = [each for each in breakages() if only in statement_of(each)], 0
    if not chosen:
        parser.error(f"--only: no breakage is of a statement with {only!r}")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "holotrain")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "runs", "*.png"))
        status, line = run(sorted({test for each in chosen for test in tests_of(statement_of(each))}), copy)
        if status:
            sys.exit(f"the tests do not pass as the code is: {line}")
        for breakage in chosen:
            path = copy / breakage["file"]
            path.write_text(broken(breakage, text := path.read_text()))
            status, line = run(tests_of(statement_of(breakage)), copy)
            path.write_text(text)
            noticed += status == 1
            said = {0: "NOT NOTICED", 1: "noticed"}.get(status, "TESTS DID NOT RUN")
            print(f"{said}: {statement_of(breakage)}\n    {line}", flush=True)
    print(f"{noticed} of {len(chosen)} breakages were noticed")
    sys.exit(noticed < len(chosen))


if __name__ == "__main__":
    main()
