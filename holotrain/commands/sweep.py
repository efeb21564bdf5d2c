"""The table of a sweep: one row per job, with its overrides, metrics, throughput, peak memory and, if it failed, why."""

from pathlib import Path

from rich import box
from rich.table import Table

from holotrain.commands import plan, summary
from holotrain.commands.console import console, plain
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
    row_of = plan.row if command == "plan" else summary.row
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
        table.add_row(*(_short(name, row.get(name, "")) for name in shown))
    aside = command == "plan" and any("json=-" in job.overrides for job in jobs.values())  # stdout is for the figures
    plain(width=max(console.width, 240), stderr=aside).print(table)  # one line per row, also in a log file
    if command != "plan" and (best := summary.best_of(done)):
        console.print(f"best job: {jobs[best[0]].number}, {best[1]} {best[2]:.4g}")
    plain(stderr=aside, soft_wrap=True).print(f"written to {folder / 'sweep.csv'}")


def _short(column: str, value: object) -> str:
    if column.endswith("_bytes") and isinstance(value, int):
        return f"{value / 2**20:.1f} MiB"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
