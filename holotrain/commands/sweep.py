"""Sweeps: the table with a row for each job, the best job, and what a job returns to a sweeper that optimises."""

import math
from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from holotrain.commands import plan
from holotrain.commands.console import console, plain, short
from holotrain.commands.summary import FIGURES, read
from holotrain.config.command_line import readable
from holotrain.config.jobs import Job
from holotrain.errors import UserError
from holotrain.folders import write_table
from holotrain.numeric import counted

ALWAYS = ("job", "status", "name", "tags", "step_peak_bytes", "error")
"""Columns that are shown even if they are the same in all jobs."""

OF_PROCESS = "peak_memory_bytes"
"""What sweep.csv alone shows: on a CPU the memory of the whole process."""


def show_sweep(command: str, folder: Path, jobs: dict[Path, Job]) -> None:
    """Prints the table of the jobs and the best of them, and writes sweep.csv into the sweep's folder."""
    row_of = plan.row if command == "plan" else _row
    rows, done = [], []
    for place, job in jobs.items():
        row = {"job": job.number, "status": "failed"} | dict(
            readable(word).lstrip("+").partition("=")[::2] for word in job.overrides
        )
        try:
            found = None if job.error else row_of(place)
            rows.append(row | (found or {"error": job.error or f"exit status {job.exit_status}"}))
            done += [place] if found else []
        except UserError as error:  # the rows of the others are still worth seeing
            rows.append(row | {"error": str(error)})
    columns = sorted(dict.fromkeys(name for row in rows for name in row), key=lambda name: name == "error")
    write_table(folder / "sweep.csv", columns, [[row.get(name, "") for name in columns] for row in rows])
    varied = {name for name in columns if len({row[name] for row in rows if name in row}) > 1 and not name.startswith("train/")}
    varied -= {OF_PROCESS} if command != "plan" else set()
    shown = [name for name in columns if name in varied or name in ALWAYS or name.startswith("best/")]
    table = Table(title=f"sweep of {counted(len(rows), 'job')}", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for name in shown:
        table.add_column(name, no_wrap=True)
    for row in rows:
        table.add_row(*(short(name, row.get(name, "")) for name in shown))
    aside = command == "plan" and any("json=-" in job.overrides for job in jobs.values())  # stdout is for the figures
    plain(width=max(console.width, 240), stderr=aside).print(table)  # one line per row, also in a log file
    if command != "plan" and (found := _best_of(done)):
        console.print(f"best job: {jobs[found[0]].number}, {found[1]} {found[2]:.4g}")
    plain(stderr=aside, soft_wrap=True).print(f"written to {folder / 'sweep.csv'}")


def _row(folder: Path) -> dict[str, Any] | None:
    """A run in the table of a sweep; None if it has no summary. Raises what :func:`read` does."""
    found = read(folder)
    if found is None:
        return None
    named = {"name": found["name"], "tags": ", ".join(found["tags"] or [])}
    named = {"status": found["status"]} | {key: text for key, text in named.items() if text}
    return named | found["metrics"] | {name: found[name] for name in FIGURES if found[name] is not None}


def _best_of(folders: Iterable[Path]) -> tuple[Path, str, float] | None:
    """The run with the best value of what the sweep optimises, that metric and the value; None unless several have one
    metric."""
    found = [(_objective(one), folder) for folder in folders if (one := read(folder))]
    found = [(value, folder, name, mode) for (name, mode, value), folder in found if name and value is not None]
    if len(found) < 2 or len({(name, mode) for _, _, name, mode in found}) > 1:
        return None
    value, folder, name, _ = (max if found[0][3] == "max" else min)(found, key=itemgetter(0))
    return folder, name, value


def best(folder: Path) -> float | None:
    """What a training returns to a sweeper: the value of the objective, else the best value of the metric that selected its
    best checkpoint; the worst possible one if it never was finite. None: the training had no such metric. Raises what
    :func:`read` does."""
    name, mode, value = _objective(read(folder) or {})
    if name is None or value is not None:
        return value
    return -math.inf if mode == "max" else math.inf


def _objective(found: dict[str, Any]) -> tuple[str | None, str | None, float | None]:
    """The metric that a sweep optimises, its mode and its value; a training that has failed or diverged may have been fast."""
    metrics = found.get("metrics", {})
    if name := found.get("objective"):
        figures = {figure: found[figure] for figure in FIGURES} if found["status"] == "completed" else {}
        return name, found.get("objective_mode"), (metrics | figures).get(name)
    name = found.get("monitor")
    return name, found.get("mode"), metrics.get(f"best/{name}")
