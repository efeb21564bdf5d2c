"""The table of a sweep: one row per job, with its overrides, metrics, throughput and peak memory."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from holotrain.commands import summary
from holotrain.commands.files import write_whole
from holotrain.commands.screen import console

FIGURES = {
    "samples_per_second": "samples/s",
    "tokens_per_second": "tokens/s",
    "step_seconds": "s/step",
    "peak_memory_bytes": "peak bytes",
    "seconds": "seconds",
}
"""The figures of a summary that the table shows, and their headings."""


def show_sweep(jobs: Mapping[Path, list[str]]) -> None:
    """Prints the table of the jobs (folders and their overrides) and writes sweep.csv into their parent folder."""
    rows = [_row(folder, overrides) for folder, overrides in jobs.items()]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    constant = {name for name in columns if name.startswith("train/") or len({row[name] for row in rows if name in row}) == 1}
    path = next(iter(jobs)).parent / "sweep.csv"
    write_whole(path, _csv(columns, rows))
    table = Table(
        title=f"sweep of {len(rows)} job{'s' * (len(rows) != 1)}", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD
    )
    shown = [name for name in columns if name in ("job", "status", *FIGURES) or name not in constant]
    for name in shown:
        table.add_column(FIGURES.get(name, name), no_wrap=True)
    for row in rows:
        table.add_row(*(_short(row.get(name, "")) for name in shown))
    # Wider than the screen, so that each row is one line, also in a log file.
    Console(highlight=False, width=max(console.width, 240)).print(table)
    console.print(f"written to {path}")


def _row(folder: Path, overrides: list[str]) -> dict[str, object]:
    changed = dict(override.lstrip("+").partition("=")[::2] for override in overrides)
    found = summary.read(folder)
    if found is None:
        return {"job": folder.name, "status": "failed"} | changed
    figures = {name: found[name] for name in FIGURES if found[name] is not None}
    return {"job": folder.name, "status": found["status"]} | changed | found["metrics"] | figures


def _csv(columns: list[str], rows: list[dict[str, object]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
