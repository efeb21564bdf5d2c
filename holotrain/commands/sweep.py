"""A sweep: what it optimises, what a job returns to its sweeper, and the table of its jobs."""

import math
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from rich import box
from rich.table import Table

from holotrain.callbacks.measured import FIGURES
from holotrain.commands import plan
from holotrain.commands.run import read_summary
from holotrain.commands.screen import console, plain, short
from holotrain.config.command_options import FitConfig
from holotrain.config.composition import Job
from holotrain.config.option_groups import TEXT, is_a
from holotrain.errors import UserError, check_choice
from holotrain.folders import write_table
from holotrain.numeric import counted
from holotrain.tasks.task import monitored_by

ALWAYS = ("job", "status", "name", "tags", "step_peak_bytes", "error")
"""Columns that are shown even if they are the same in all jobs."""


def objective_of(config: FitConfig, task: pl.LightningModule, tested: bool) -> tuple[str, str] | None:
    """What a sweep optimises instead of the metric that selects the best checkpoint, and ``min`` or ``max``. Raises a UserError
    if the training does not measure it; ``tested``: whether it is tested."""
    if config.objective is None:
        return None
    modes = {"train/loss": "min"} | {name: "max" if name.endswith("per_second") else "min" for name in FIGURES}
    if not is_a(config.data, TEXT):
        del modes["tokens_per_second"]
    if config.trainer.limit_val_batches != 0:
        modes |= monitored_by(task)
    if tested:
        modes |= {metric.replace("val/", "test/"): mode for metric, mode in monitored_by(task).items()}
    check_choice("objective", config.objective, modes)
    return config.objective, modes[config.objective]


def check_direction(objective: tuple[str, str] | None, direction: str | None) -> None:
    """Raises a UserError if the sweeper searches for the worst values of what it optimises."""
    if direction is None:
        return
    if objective is None:
        raise UserError("the sweeper needs a validation metric: use callbacks.checkpoint and trainer.limit_val_batches=1.0")
    metric, better = objective[0], "maximize" if objective[1] == "max" else "minimize"
    if direction != better:
        raise UserError(f"hydra.sweeper.direction={direction}: use {better}, the better values of {metric}")


def best(folder: Path) -> float | None:
    """What a training returns to a sweeper: the score in its summary; the worst possible one if it never was finite. None: the
    training had no metric of validation. Raises what :func:`read_summary` does."""
    found = read_summary(folder) or {}
    if found.get("monitor") is None or found["score"] is not None:
        return found.get("score")
    return -math.inf if found["mode"] == "max" else math.inf


def show_sweep(command: str, folder: Path, jobs: dict[Path, Job]) -> None:
    """Prints the table of the jobs and the best of them, and writes sweep.csv into the sweep's folder."""
    row_of = plan.row if command == "plan" else _row
    rows = []
    for place, job in jobs.items():
        options = dict(word.lstrip("+").partition("=")[::2] for word in job.overrides)
        row = {"job": job.number, "status": "failed"} | options
        try:
            found = None if job.error else row_of(place)
            row |= found or {"error": job.error or f"exit status {job.exit_status}"}
        except UserError as error:  # the rows of the others are still worth seeing
            row["error"] = str(error)
        rows.append(row)
    columns = sorted(dict.fromkeys(name for row in rows for name in row), key=lambda name: name == "error")
    write_table(folder / "sweep.csv", columns, [[row.get(name, "") for name in columns] for row in rows])
    aside = command == "plan" and any("json=-" in job.overrides for job in jobs.values())  # stdout is for the figures
    # One line per row, also in a log file.
    plain(width=max(console.width, 240), stderr=aside).print(_table(columns, rows, fits=command != "plan"))
    if command != "plan" and (best_job := _best_job(jobs)):
        console.print(best_job)
    plain(stderr=aside, soft_wrap=True).print(f"written to {folder / 'sweep.csv'}")


def _table(columns: list[str], rows: list[dict[str, Any]], fits: bool) -> Table:
    """The columns in which jobs differ; without the peak of a training, which on a CPU is that of the whole process."""
    table = Table(title=f"sweep of {counted(len(rows), 'job')}", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    shown = []
    for name in columns:
        varies = len({row[name] for row in rows if name in row}) > 1 and not name.startswith("train/")
        varies &= not (fits and name == "peak_memory_bytes")
        if varies or name in ALWAYS or name.startswith("best/"):
            shown.append(name)
            table.add_column(name, no_wrap=True)
    for row in rows:
        table.add_row(*(short(name, row.get(name, "")) for name in shown))
    return table


def _row(folder: Path) -> dict[str, Any] | None:
    """A run in the table of a sweep; None if it has no summary. Raises what :func:`read_summary` does."""
    found = read_summary(folder)
    if found is None:
        return None
    named = {"name": found["name"], "tags": ", ".join(found["tags"] or [])}
    named = {"status": found["status"]} | {key: text for key, text in named.items() if text}
    return named | found["metrics"] | {name: found[name] for name in FIGURES if found[name] is not None}


def _best_job(jobs: dict[Path, Job]) -> str | None:
    """The job with the best value of what the sweep optimises; None unless several have a value of one metric."""
    scores = []
    for folder, job in jobs.items():
        with suppress(UserError):  # its row says so
            found = None if job.error else read_summary(folder)
            if found and found["score"] is not None:
                scores.append((found["score"], job.number, found["monitor"], found["mode"]))
    if len(scores) < 2 or len({(monitor, mode) for _, _, monitor, mode in scores}) > 1:
        return None
    score, number, monitor, _ = (max if scores[0][3] == "max" else min)(scores, key=itemgetter(0))
    return f"best job: {number}, {monitor} {score:.4g}"
