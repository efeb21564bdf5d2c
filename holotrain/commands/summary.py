"""summary.json: the results of a run, and whether it goes on."""

import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from holotrain.callbacks import MemoryMonitor, ThroughputMonitor
from holotrain.commands.run_folder import Run
from holotrain.config.annotations import read_fields
from holotrain.config.build_trainer import device_name
from holotrain.config.command_line import readable
from holotrain.config.command_options import FitConfig, RunConfig
from holotrain.config.option_groups import EARLY_STOPPING, is_a
from holotrain.errors import UserError
from holotrain.folders import write_whole
from holotrain.models.quantised import parameter_count
from holotrain.numeric import counted

SUMMARY = "summary.json"

FIGURES = ("samples_per_second", "tokens_per_second", "step_seconds", "step_peak_bytes", "peak_memory_bytes", "seconds")
"""Those that checkpoints keep and the table of a sweep has, beside the metrics."""

HELPS = "a smaller optimizer.lr or a longer scheduler.warmup may help"
"""What to do about a loss that is not finite."""

REQUIRED = {"command", "status", "overrides", "metrics"}
"""What every summary holds."""


@dataclass
class Summary:
    """The results of a run. Times in seconds, memory in bytes; None where a figure does not apply.

    ``monitor`` is what a sweep optimises: the option ``objective``, else the metric that selects the best checkpoint. ``mode``
    is its ``max`` or ``min``, ``score`` its value. ``step_peak_bytes`` is what a step took on its device,
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
    score: float | None = None
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


def continued(config: FitConfig, run: Run) -> FitConfig:
    """The configuration, which continues the run if torchrun started its processes again. Raises a UserError if the folder
    holds another run, or has a name that a checkpoint cannot hold."""
    try:
        str(folder := run.folder.absolute()).encode()
    except UnicodeEncodeError:
        raise UserError(f"{folder}: its name is not text in UTF-8, and checkpoints hold it; train in another folder") from None
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and run.last_checkpoint.exists():
        print(f"holotrain: torchrun started again, from {run.last_checkpoint}", file=sys.stderr)
        return replace(config, resume=True, ckpt_path=None)
    if not config.resume and (run.last_checkpoint.exists() or completed(run.folder) is not None):
        raise UserError(f"{run.folder} already holds a run; give another folder, or continue that run with resume=true")
    return config


def ended(config: FitConfig, folder: Path) -> str | None:
    """A message if the training of this folder has already reached its limit or was stopped early, else None. Resuming it would
    overwrite its results with those of zero steps."""
    found = completed(folder)
    if found is None:
        return None
    for unit, done in (("epoch", found["whole_epochs"]), ("step", found["steps"])):
        limit = getattr(config.trainer, f"max_{unit}s")
        if limit > 0 and (done or 0) >= limit:
            return f"{folder}: already complete, {done} of {counted(limit, unit)}; to train on, raise trainer.max_{unit}s"
    patience = found["early_stopping_patience"]
    for name, each in config.callbacks.items():
        if patience is not None and is_a(each, EARLY_STOPPING) and each.patience <= patience:
            done = counted(found["epochs"] or 0, "epoch")
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


def _finite(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Measured(pl.Callback):
    """Keeps in checkpoints what a training has measured. The summary of a resumed one is whole, even if no step was left. Logs
    the best value so far of the metric that selects the best checkpoint, as ``best/val/...``.

    Args:
        started: when the run began, by ``time.monotonic``.
        resumed: the training goes on with the numbers of the checkpoint; otherwise it begins without any.
        monitor: selects the best checkpoint. Its state is saved in checkpoints, so a resumed training goes on from there.

    Attributes:
        diverged: which loss is not finite, and since when; None: all were finite at the end of the last epoch.
    """

    def __init__(self, started: float, resumed: bool, monitor: ModelCheckpoint | None = None) -> None:
        self.started, self.resumed, self.monitor = started, resumed, monitor
        self.best: float | None = None
        self.diverged: str | None = None
        self._before: dict[str, Any] = {}

    def results(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Fields of a summary by their names, each as it was measured last."""
        found: dict[str, Any] = {"seconds": self._before.get("seconds", 0) + time.monotonic() - self.started}
        for callback in trainer.callbacks:  # ty: ignore[missing-attribute]
            if isinstance(callback, ThroughputMonitor | MemoryMonitor):
                found |= {name: value for name in FIGURES if (value := getattr(callback, name, None)) is not None}
            if isinstance(callback, MemoryMonitor) and callback.peak_bytes is not None:
                found["peak_memory_bytes"] = callback.peak_bytes
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        return self._before | found | {"metrics": self._before.get("metrics", {}) | metrics}

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["measured"] = self.results(trainer)

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        kept = checkpoint.get("measured")
        if self.resumed and isinstance(kept, dict):  # a file may hold anything
            self._before = {name: value for name, value in _numbers(kept).items() if name in FIGURES}
            self._before["metrics"] = _numbers(kept.get("metrics"))

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        stopping = (each for each in trainer.callbacks if isinstance(each, EarlyStopping))  # ty: ignore[missing-attribute]
        self._patience = {callback: callback.patience for callback in stopping}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for callback, patience in self._patience.items():
            callback.patience = patience  # as configured now: Lightning has loaded that of the checkpoint

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        losses = {name: float(trainer.callback_metrics.get(name, 0.0)) for name in ("train/loss", "val/loss")}
        wrong = next((name for name, value in losses.items() if not math.isfinite(value)), None)
        if wrong is None:
            self.diverged = None
        elif self.diverged is None:
            self.diverged = f"{wrong} is {losses[wrong]} since epoch {trainer.current_epoch + 1}"
            rank_zero_warn(f"{self.diverged}; {HELPS}")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking or self.monitor is None:
            return
        self.best = self.best_so_far(trainer.callback_metrics.get(self.monitor.monitor))
        if self.best is not None:
            for logger in trainer.loggers:
                logger.log_metrics({f"best/{self.monitor.monitor}": self.best}, step=trainer.global_step)

    def best_so_far(self, latest: Tensor | None = None) -> float | None:
        """The best finite value of the metric, that of an earlier part of the training and the latest included; None: there is
        none."""
        assert self.monitor is not None
        known = [value for value in (self.best, self.monitor.best_model_score, latest) if value is not None]
        finite = [float(value) for value in known if math.isfinite(value)]
        return (max if self.monitor.mode == "max" else min)(finite, default=None)


def _numbers(kept: Any) -> dict[str, float]:
    items = kept.items() if isinstance(kept, dict) else ()
    return {name: value for name, value in items if isinstance(name, str) and isinstance(value, int | float)}
