"""Runs the tests marked ``cuda`` of some folders of tests/, with torch and pytest alone.

    python scripts/cuda_tests.py reversible models --json scripts/results/cuda/tests.json

A file that imports Lightning is left out, and named, where Lightning is not installed.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path

import pytest
from bench_common import arguments, begin, save, verdict

TESTS = Path(__file__).parents[1] / "tests"


class Outcomes:
    """A pytest plugin that counts."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failed: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = report.longreprtext.strip().splitlines()[-1]
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = report.longreprtext.strip().splitlines()[-1]


def files_of(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files with such tests, and those of them that need Lightning where it is not installed."""
    marked = sorted(path for path in folder.rglob("test_*.py") if "mark.cuda" in path.read_text())
    if importlib.util.find_spec("lightning"):
        return marked, []
    needing = [path for path in marked if "import lightning" in path.read_text()]
    return [path for path in marked if path not in needing], needing


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("folders", nargs="+", help="folders of tests/")
    options = parser.parse_args()
    found = [files_of(TESTS / folder) for folder in options.folders]
    files, left_out = ([path for pair in found for path in pair[part]] for part in (0, 1))
    for path in left_out:
        print(f"  {path.relative_to(TESTS)} left out: Lightning is not installed", file=sys.stderr)
    outcomes = Outcomes()
    status = pytest.main(["-m", "cuda", "-p", "no:cacheprovider", "-p", "no:randomly", *map(str, files)], [outcomes])
    result = begin(options) | {"counts": dict(outcomes.counts), "failed": outcomes.failed}
    verdict(result, f"failures beside {outcomes.counts['passed']} tests that pass", len(outcomes.failed), 0)
    save(result | {"left_out": [str(path.relative_to(TESTS)) for path in left_out]}, options.json)
    if outcomes.failed or status != pytest.ExitCode.OK:
        named = "; ".join(f"{test}: {error}" for test, error in outcomes.failed.items())
        raise SystemExit(f"{len(outcomes.failed)} failures, pytest ended with {int(status)}: {named}")


if __name__ == "__main__":
    main()
