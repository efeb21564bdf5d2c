"""One run of a command: its folder, its overrides and processes, its summary.json, and whether it goes on."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger
from torch import nn

from holotrain.config.build import device_name
from holotrain.config.checkpointed import COMMAND_LINE_ONLY
from holotrain.config.command_line import LOCAL_LOGGERS
from holotrain.config.command_options import FitConfig, RunConfig
from holotrain.config.composition import LOG, key_of
from holotrain.config.option_groups import EARLY_STOPPING, PYTHON_OBJECT, is_a
from holotrain.config.signatures import read_fields
from holotrain.errors import UserError
from holotrain.folders import LAST_CHECKPOINT, as_word, refuse_links, write_whole
from holotrain.models.quantised import parameter_count
from holotrain.numeric import counted
from holotrain.parallel.rank import ProcessRank
from holotrain.targets import TARGET

SUMMARY = "summary.json"

OF_FIT = {option.name for option in fields(FitConfig)} - {option.name for option in fields(RunConfig)} - {"resume"}
"""Options of fit alone, which a checkpoint does not keep."""

WRITTEN_IN_PLACE = (LOG, LAST_CHECKPOINT.parts[0], "tensorboard", "csv")
"""What a run opens to write, or makes files in. All else is written under another name, and renamed."""


@dataclass
class Run:
    """
    Args:
        command: fit, validate, test, predict, generate, export or plan.
        folder: the folder of its files.
        overrides: the overrides of the command line, as written there.
        choices: the chosen option of each configuration group, saved in checkpoints.
        varied: the options and groups that a sweep varies; empty without a sweep.
        direction: ``maximize`` or ``minimize``, what the sweeper does with the monitored metric; None: it does not optimise.
        config_dir: the user's folder of options; None: there is none.
        process: rank of this process among those of the run; None: it is the only one.
        errors: what went wrong in several processes, in one line.
        callbacks, loggers: objects that Python code gave, beside those of the configuration.
        started: when, by the clock of this machine.
    """

    command: str
    folder: Path
    overrides: list[str]
    choices: dict[str, str]
    varied: list[str] = field(default_factory=list)
    direction: str | None = None
    config_dir: str | None = None
    process: ProcessRank | None = None
    errors: list[str] = field(default_factory=list)
    callbacks: list[pl.Callback] = field(default_factory=list)
    loggers: list[Logger] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @property
    def last_checkpoint(self) -> Path:
        return self.folder / LAST_CHECKPOINT

    @property
    def how_to_resume(self) -> str:
        if self.callbacks or self.loggers or any(word.endswith(f".{TARGET}={PYTHON_OBJECT}") for word in self.overrides):
            return f"resume with: holotrain.fit(the same objects, overrides=['resume=true'], folder={str(self.folder)!r})"
        words = ["--config-dir", self.config_dir] if self.config_dir else []
        words += ["resume=true", f"hydra.run.dir={as_word(self.folder)}"]
        for word in self.overrides:
            key = key_of(word)
            if key in (*COMMAND_LINE_ONLY, *OF_FIT) or key.startswith("logger.") or key.endswith(f".{TARGET}"):
                words.append(word.lstrip("+"))  # the checkpoint has what it added
        if (logger := self.choices.get("logger", LOCAL_LOGGERS[0])) not in LOCAL_LOGGERS:  # also that of an experiment
            words.append(f"logger={logger}")
        job = shlex.join(["python", "-m", "holotrain", "fit", *words])
        if not self.varied:
            return f"resume with: {job}"
        return f"resume the sweep with its command plus resume=true, or this job with: {job}"

    def hint(self) -> str:
        """How to resume after a process died or the test failed, if there is a checkpoint."""
        return f"; {self.how_to_resume}" if self.last_checkpoint.exists() else ""

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes files."""
        return self.process is None or self.process.is_main


@contextmanager
def run_folder_made(folder: Path) -> Generator[None]:
    """Makes a folder; after a mistake it is removed if nothing was written. Raises a UserError if it cannot be made, or what a
    run writes to would be elsewhere."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {error.filename or folder}: {error.strerror or error}") from error
    try:
        refuse_links(folder, WRITTEN_IN_PLACE)
        yield
    except UserError:
        with suppress(OSError):  # such as: it is not empty
            folder.rmdir()
        raise


@contextmanager
def matmul_precision(precision: str) -> Generator[None]:
    """Inside, products and convolutions of float32 have this precision, one of ``torch.set_float32_matmul_precision``; with
    ``highest`` nothing is in TF32, in which torch alone computes convolutions. Afterwards it is as before, unless the caller
    has used ``fp32_precision``: then torch refuses to read it."""
    cudnn, before = torch.backends.cudnn, None
    with suppress(RuntimeError):
        before = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    torch.set_float32_matmul_precision(precision)
    cudnn.allow_tf32 = precision != "highest"
    try:
        yield
    finally:
        if before is not None:
            torch.set_float32_matmul_precision(before[0])
            cudnn.allow_tf32 = before[1]


@dataclass
class Summary:
    """The results of a run. Times in seconds, memory in bytes; None where a figure does not apply.

    ``monitor`` is what a sweep optimises: the option ``objective``, else the metric that selects the best checkpoint. ``mode``
    is its ``max`` or ``min``, ``score`` its value. ``step_peak_bytes`` is what a step took on its device,
    ``planned_step_bytes`` what was planned, if something was chosen by a plan. ``whole_epochs`` leaves out an epoch that
    ``max_steps`` cut short.
    ``seconds`` counts every part of a training that was resumed, ``overrides`` are those of the last part, and ``choices`` the
    option of each group. ``early_stopping_patience`` is that of the EarlyStopping that ended the training,
    and ``max_time`` the limit of time that did.
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
    max_time: str | None = None
    name: str | None = None
    tags: list[str] = field(default_factory=list)
    choices: dict[str, str] = field(default_factory=dict)


REQUIRED = {"command", "status", "overrides", "metrics"}
"""What every summary holds."""


def write_summary(run: Run, config: RunConfig, model: nn.Module, status: str = "completed", **results: Any) -> Summary:
    """The summary of a run, which its main process writes into the run's folder."""
    trainer = config.trainer
    results.setdefault("seconds", time.monotonic() - run.started)
    summary = Summary(
        command=run.command,
        status=status,
        overrides=[*run.overrides],
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


def _finite(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_summary(folder: Path) -> dict[str, Any] | None:
    """A run's summary; None if it has none. Raises a UserError if the file cannot be read."""
    path = folder / SUMMARY
    if not path.is_file():
        return None
    kinds = {each.name: str(each.type) if each.name in REQUIRED else f"{each.type} | None" for each in fields(Summary)}
    return read_fields(path, kinds | {"metrics": "dict[str, float | None]"}, "summary", kinds)  # null is what is not finite


def completed(folder: Path) -> dict[str, Any] | None:
    """The summary of a training in this folder that has reached its end; None: there is none."""
    found = read_summary(folder)
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
