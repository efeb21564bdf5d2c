"""summary.json: the results of a run."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holotrain.config.annotations import read_fields
from holotrain.config.command_line import readable
from holotrain.config.option_groups import EARLY_STOPPING, is_a
from holotrain.folders import write_whole
from holotrain.numeric import counted

if TYPE_CHECKING:  # reading a summary does not import torch and Lightning
    from torch import nn

    from holotrain.commands.run_folder import Run
    from holotrain.config.command_options import FitConfig, RunConfig

SUMMARY = "summary.json"

FIGURES = ("samples_per_second", "tokens_per_second", "step_seconds", "step_peak_bytes", "peak_memory_bytes", "seconds")
"""Those that the table of a sweep shows, beside the metrics."""

REQUIRED = {"command", "status", "overrides", "metrics"}
"""What every summary holds."""


@dataclass
class Summary:
    """The results of a run. Times in seconds, memory in bytes; None where a figure does not apply.

    ``monitor`` is the metric that selects the best checkpoint, and ``mode`` its ``max`` or ``min``; ``objective`` and
    ``objective_mode`` are those of what a sweep optimises instead. ``step_peak_bytes`` is what a step took on its device,
    ``planned_step_bytes`` what was planned, if something was chosen by a plan. ``whole_epochs`` leaves out an epoch that
    ``max_steps`` cut short.
    ``seconds`` counts every part of a training that was resumed, ``overrides`` are those of the last part, and ``choices`` the
    option of each group. ``early_stopping_patience`` is that of the EarlyStopping that ended the training.
    """

    command: str
    status: str
    overrides: list[str]
    device: str
    precision: str
    backward: str
    synthesis: str
    parameters: int
    seconds: float
    float32_matmul_precision: str = "highest"
    strategy: str | dict[str, Any] = "single"
    processes: int = 1
    monitor: str | None = None
    mode: str | None = None
    objective: str | None = None
    objective_mode: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    epochs: int | None = None
    whole_epochs: int | None = None
    steps: int | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    peak_memory_bytes: int | None = None
    step_peak_bytes: int | None = None
    planned_step_bytes: int | None = None
    checkpoint: str | None = None
    early_stopping_patience: int | None = None
    name: str | None = None
    tags: list[str] = field(default_factory=list)
    choices: dict[str, str] = field(default_factory=dict)


def write_summary(run: Run, config: RunConfig, model: nn.Module, status: str = "completed", **results: Any) -> Summary:
    """The summary of a run, which its main process writes into the run's folder."""
    from holotrain.config.build_trainer import device_name
    from holotrain.models.quantised import parameter_count

    trainer = config.trainer
    results.setdefault("seconds", time.monotonic() - run.started)
    summary = Summary(
        command=run.command,
        status=status,
        overrides=[readable(word) for word in run.overrides],
        choices=run.choices,
        device=device_name(trainer.accelerator),
        precision=trainer.precision,
        backward=config.backward.name,
        synthesis=getattr(config.synthesis, "mode", "none"),
        parameters=parameter_count(model),
        float32_matmul_precision=trainer.float32_matmul_precision,
        strategy=trainer.strategy,
        processes=run.process.size if run.process else 1,
        name=config.name,
        tags=[*config.tags],
        **results,
    )
    if run.is_main:
        write_whole(run.folder / SUMMARY, json.dumps(_finite(asdict(summary)), indent=2) + "\n")
    return summary


def completed(folder: Path) -> dict[str, Any] | None:
    """The summary of a training in this folder that has reached its end; None: there is none."""
    found = read(folder)
    return found if found is not None and found["command"] == "fit" and found["status"] in ("completed", "diverged") else None


def ended(config: FitConfig, folder: Path) -> str | None:
    """A message if the training of this folder has already reached its limit or was stopped early, else None.

    Resuming such a training would overwrite its results with those of zero steps.
    """
    found = completed(folder)
    if found is None:
        return None
    epochs = found.get("epochs") if found.get("whole_epochs") is None else found["whole_epochs"]
    for unit, done in (("epoch", epochs), ("step", found.get("steps"))):
        limit = getattr(config.trainer, f"max_{unit}s")
        if limit > 0 and (done or 0) >= limit:
            return f"{folder}: already complete, {done} of {counted(limit, unit)}; to train on, raise trainer.max_{unit}s"
    patience = found.get("early_stopping_patience")
    for name, each in config.callbacks.items():
        if patience is not None and is_a(each, EARLY_STOPPING) and each.patience <= patience:
            done = counted(found.get("epochs") or 0, "epoch")
            remedy = f"to train on, raise callbacks.{name}.patience, or take it out"
            return f"{folder}: already complete, stopped early after {done}; {remedy}"
    return None


def read(folder: Path) -> dict[str, Any] | None:
    """A run's summary; None if it has none. Raises a UserError if the file cannot be read."""
    path = folder / SUMMARY
    if not path.is_file():
        return None
    kinds = {each.name: str(each.type) if each.name in REQUIRED else f"{each.type} | None" for each in fields(Summary)}
    return read_fields(path, kinds | {"metrics": "dict[str, float | None]"}, "summary", kinds)  # null is what is not finite


def row(folder: Path) -> dict[str, Any] | None:
    """A run in the table of a sweep; None if it has no summary. Raises what :func:`read` does."""
    found = read(folder)
    if found is None:
        return None
    named = {"name": found["name"], "tags": ", ".join(found["tags"] or [])}
    named = {"status": found["status"]} | {key: text for key, text in named.items() if text}
    return named | found["metrics"] | {name: found[name] for name in FIGURES if found[name] is not None}


def best_of(folders: Iterable[Path]) -> tuple[Path, str, float] | None:
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


def _finite(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
