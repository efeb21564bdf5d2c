"""The table of a sweep: one row per job, with its overrides, metrics, throughput, peak memory and, if it failed, why."""

import re
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from holotrain.commands import summary
from holotrain.commands.console import console, plain
from holotrain.commands.plan import PLAN
from holotrain.commands.writing import write_table
from holotrain.config.annotations import read_fields
from holotrain.config.jobs import Job
from holotrain.errors import UserError
from holotrain.numeric import counted

FIGURES = {
    "samples_per_second": "samples/s",
    "tokens_per_second": "tokens/s",
    "step_seconds": "s/step",
    "peak_memory_bytes": "peak MiB",
    "seconds": "seconds",
}
"""The figures of a summary that the table shows, and their headings."""

PLANNED = {"backward": "str", "fits": "bool | None", "peak_bytes": "int", "largest": "dict[str, int]"}
"""What the table shows of a ``plan.json``, with the types as annotations."""


def show_sweep(command: str, folder: Path, jobs: list[Job]) -> None:
    """Prints the table of the jobs and the best of them, and writes sweep.csv into the sweep's folder."""
    read = read_plan if command == "plan" else summary.read
    found: dict[int, dict[str, Any] | None] = {}
    for job in jobs:
        try:
            found[job.number] = read(job.folder) if job.folder and not job.error else None
        except UserError as error:  # the rows of the others are still worth seeing
            found[job.number], job.error = None, str(error)
    rows = [_row(job, found[job.number]) for job in jobs]
    columns = sorted(dict.fromkeys(name for row in rows for name in row), key=lambda name: name == "error")
    constant = {name for name in columns if name.startswith("train/") or len({row[name] for row in rows if name in row}) == 1}
    constant -= {f"best/{one['monitor']}" for one in found.values() if one and "monitor" in one}
    path = folder / "sweep.csv"
    write_table(path, columns, [[row.get(name, "") for name in columns] for row in rows])
    table = Table(title=f"sweep of {counted(len(rows), 'job')}", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    shown = [name for name in columns if name in ("job", "status", "error", *FIGURES) or name not in constant]
    for name in shown:
        table.add_column(FIGURES.get(name, name), no_wrap=True)
    for row in rows:
        table.add_row(*(_short(name, row.get(name, "")) for name in shown))
    aside = command == "plan" and any("json=-" in job.overrides for job in jobs)  # stdout is for the figures
    # Wider than the screen, so that each row is one line, also in a log file.
    plain(width=max(console.width, 240), stderr=aside).print(table)
    if command != "plan" and (best := _best([one for one in found.values() if one])):
        number = next(number for number, one in found.items() if one is best)
        console.print(f"best job: {number}, {best['monitor']} {_short(best['monitor'], summary.best_value(best))}")
    plain(stderr=aside, soft_wrap=True).print(f"written to {path}")


def read_plan(folder: Path) -> dict[str, Any] | None:
    """The figures of a plan as a row of the table; None if there is no plan.

    Raises:
        UserError: the file cannot be read.
    """
    path = folder / PLAN
    if not path.is_file():
        return None
    plan = read_fields(path, PLANNED, "plan")
    fits = {None: "", True: "yes", False: "no"}[plan["fits"]]
    largest = {f"largest {name}": value for name, value in plan["largest"].items()}
    return {"status": "planned", "schedule": plan["backward"], "peak_memory_bytes": plan["peak_bytes"], "fits": fits} | largest


def _row(job: Job, found: dict[str, Any] | None) -> dict[str, object]:
    row = {"job": job.number, "status": found["status"] if found else "failed"}
    row |= dict(override.lstrip("+").partition("=")[::2] for override in job.overrides)
    if found is None:
        return row | {"error": job.error or f"exit status {job.exit_status}"}
    if "metrics" not in found:  # a plan
        return row | found
    return row | found["metrics"] | {name: found[name] for name in FIGURES if found[name] is not None}


def _best(found: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The summary with the best value of the monitored metric; None unless several jobs have values of one metric."""
    known = [(value, one) for one in found if (value := summary.best_value(one)) is not None]
    if len(known) < 2 or len({(one["monitor"], one["mode"]) for _, one in known}) > 1:
        return None
    choose = max if known[0][1]["mode"] == "max" else min
    return choose(known, key=itemgetter(0))[1]


def _short(column: str, value: object) -> str:
    if column == "peak_memory_bytes" and isinstance(value, int):
        return f"{value / 2**20:.0f}"
    if isinstance(value, str) and re.fullmatch(r"-?\d\.\d{6,}(e-?\d+)?", value):  # a sweeper chose it
        value = float(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
