"""What compares runs: what a sweep optimises, the table of a sweep, and TensorBoard's tabs HParams and Custom Scalars."""

import math
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from rich import box
from rich.table import Table
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData  # ty: ignore[missing-module-member]
from torch.utils.tensorboard.summary import hparams

from holotrain.callbacks.measured import FIGURES
from holotrain.commands import plan
from holotrain.commands.run import Run, read_summary
from holotrain.commands.screen import console, plain, short
from holotrain.config.command_line import readable
from holotrain.config.command_options import FitConfig
from holotrain.config.composition import MODES, key_of
from holotrain.config.jobs import Job
from holotrain.config.option_groups import ERROR_DIFFUSION, TEXT, is_a
from holotrain.config.structured import to_container
from holotrain.errors import UserError, check_choice
from holotrain.folders import write_table
from holotrain.numeric import counted
from holotrain.schedules import PLAIN
from holotrain.tasks.task import monitored_by

PHASES = ("forward_backward", "optimizer", "validation")

CHARTS = {
    "Loss": {"Loss": ("train/loss", "val/loss")},
    "Accuracy": {"Accuracy": ("val/accuracy", "val/accuracy_top5")},
    "Perplexity": {"Bits per byte": ("val/bits_per_byte",), "Perplexity": ("val/perplexity",)},
    "Memory": {
        "Memory": ("memory/peak_bytes", "memory/current_bytes", "memory/reserved_bytes"),
        "Peak of a step": ("memory/step_peak_bytes",),
        "Peak memory by phase": tuple(f"memory/{phase}_peak_bytes" for phase in PHASES),
    },
    "Throughput": {
        "Throughput": ("throughput/samples_per_second",),
        "Throughput in tokens": ("throughput/tokens_per_second",),
        "Step time": ("throughput/step_seconds",),
        "FLOPs utilization": ("throughput/mfu", "throughput/hfu"),
    },
    "Drift": {"Error of recomputed activations": ("reversible/drift",)},
    "Synthesis": {
        "Cosine between update and gradient": ("synthesis/gradient_cosine",),
        "Synthesis time": ("synthesis/milliseconds",),
        "Update norm": ("synthesis/update_norm",),
        "Skipped steps": ("synthesis/skipped",),
    },
    "Error diffusion": {
        "Cosine between update and gradient descent": ("error_diffusion/alignment",),
        "Dead cells and wrong signs": ("error_diffusion/dead_cells", "error_diffusion/sign_violations"),
    },
    "Optimization": {
        "Gradient norm before clipping": ("optimization/gradient_norm",),
        "Size of updates relative to weights": ("optimization/update_ratio",),
    },
    "Learning rate": {"Learning rate": ("train/lr",)},
}
"""The tags of each chart, by its group and its title."""

NOT_COMPARED = ("output_dir", "resume", "hydra", "logger", "name", "tags")
"""Options that do not change the training."""

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
    metric, mode = objective
    if direction != MODES[mode]:
        raise UserError(f"hydra.sweeper.direction={direction}: use {MODES[mode]}, the better values of {metric}")


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
        options = dict(readable(word).lstrip("+").partition("=")[::2] for word in job.overrides)
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


def log_options(loggers: Iterable[Logger], config: FitConfig, run: Run, validated: list[str]) -> None:
    """Logs the options and, for TensorBoard, the charts and the names of the results, before a run trains, so that one that was
    killed is compared too. ``validated`` are the metrics of validation, the one that selects the best checkpoint first."""
    options = dict(_flat(to_container(config)))
    for logger in loggers:
        if not isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(options)
            continue
        logger.experiment.add_custom_scalars(_layout(config, validated))
        # Lightning's log_hyperparams(options, results) would add a point to the curve of every metric.
        results = dict.fromkeys(_results(config, validated), 0.0)
        columns, first = _columns(run, options)
        experiment, session, _ = hparams(columns, results)
        _show_first(experiment, first)
        for event in (experiment, session):
            logger.experiment._get_file_writer().add_summary(event)
        logger.experiment.flush()  # else a run that is killed in its first minutes would have none


def _flat(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested options with their full names."""
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _layout(config: FitConfig, validated: list[str]) -> dict[str, dict[str, list]]:
    """The charts of what a training logs, in the form of ``SummaryWriter.add_custom_scalars``.

    A chart always lists all its lines: TensorBoard merges the layouts of runs by chart, and shows a chart twice if the lines
    of two runs differ.
    """
    logged = {"train": True, "memory": True, "throughput": True, "optimization": True}
    logged |= {"reversible": config.backward.kind not in PLAIN, "synthesis": config.synthesis is not None}
    logged["error_diffusion"] = is_a(config.task, ERROR_DIFFUSION)
    layout: dict[str, dict[str, list]] = {}
    for group, charts in CHARTS.items():
        for title, lines in charts.items():
            if any(tag in validated or logged.get(tag.partition("/")[0]) for tag in lines):
                # TensorBoard matches tags by regular expressions from the start; $ ends the match.
                layout.setdefault(group, {})[title] = ["Multiline", [f"{tag}$" for tag in lines]]
    return layout


def _results(config: FitConfig, validated: list[str]) -> list[str]:
    """The results, in the order of their importance."""
    results = [*validated[:2], "memory/step_peak_bytes", "seconds", *validated[2:]]
    results += [f"best/{name}" for name in validated[:1]]
    if config.test:
        results += [name.replace("val/", "test/") for name in validated]
    return [*results, "memory/peak_bytes", "throughput/samples_per_second"]


def _columns(run: Run, options: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """The options to compare, and which of them come first: what the sweep varies, else what the command line gives."""
    named = {"name": options["name"], "tags": ", ".join(options["tags"])}
    columns = {name: text for name, text in named.items() if text}
    for name, value in (options | run.choices).items():
        if name.split(".")[0] not in NOT_COMPARED:
            columns[name] = value if type(value) in (int, float) else str(value)
    first = {*(run.varied or map(key_of, run.overrides)), *named}
    return columns, first & columns.keys()


def _show_first(experiment: Any, names: set[str]) -> None:
    """Marks some options of a summary of HParams. TensorBoard sorts its columns by this mark, then by name."""
    plugin_data = experiment.value[0].metadata.plugin_data
    content = HParamsPluginData.FromString(plugin_data.content)
    for option in content.experiment.hparam_infos:
        option.differs = option.name in names
    plugin_data.content = content.SerializeToString()


def finish(loggers: Iterable[Logger], completed: bool) -> None:
    """Closes the loggers, which show whether the run was completed."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger) and completed:
            logger.experiment._get_file_writer().add_summary(hparams({}, {})[2])
        logger.finalize("success" if completed else "failed")
        if isinstance(logger, WandbLogger):
            logger.experiment.finish(exit_code=int(not completed))  # else the next job of a sweep continues this run


@contextmanager
def finished_if_it_fails(loggers: Iterable[Logger]) -> Generator[None]:
    """Closes the loggers of a run that an error ends inside."""
    try:
        yield
    except BaseException:
        finish(loggers, completed=False)
        raise
