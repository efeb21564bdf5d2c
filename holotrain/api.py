"""The commands as Python functions, for scripts and notebooks: ``holotrain.fit``, ``load``, ``plan``, ...

They run what the command line runs, with the same folders and checkpoints. A model, a data module or a task may be objects.
A mistake raises a UserError, whose text is one line.
"""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Collection
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field, fields, replace
from io import StringIO
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
from torch import nn

from holotrain.commands.generate import GENERATIONS
from holotrain.commands.multiprocess import run_job
from holotrain.commands.plan import planned
from holotrain.commands.predict import PREDICTIONS
from holotrain.commands.prepare import described_model
from holotrain.commands.run import Run, read_summary
from holotrain.commands.screen import quietly
from holotrain.config import checkpointed
from holotrain.config.command_options import COMMANDS, ExportConfig, PlanConfig, RunConfig
from holotrain.config.objects import PYTHON_OBJECT, full_name
from holotrain.config.option_groups import MODEL_OPTIONS, OBJECT_GROUPS, default_backward
from holotrain.config.start import compose
from holotrain.config.structured import structured, to_container
from holotrain.errors import UserError, as_user_error
from holotrain.folders import as_word, checkpoint_path, relative_to_cwd, run_folder
from holotrain.models import saved
from holotrain.parallel.rank import rank_from_environment
from holotrain.planning.memory_plan import Plan
from holotrain.targets import TARGET

OBJECTS = {"model": nn.Module, "data": pl.LightningDataModule, "task": pl.LightningModule}
"""What an object of each group must be."""


@dataclass(frozen=True)
class Result:
    """What a training leaves.

    Args:
        model: the model with the weights of ``checkpoint``, in eval mode, on the CPU; if ``holotrain.fit`` was given an object,
            that object. None: a model of the configuration of which no checkpoint was saved.
        metrics: the figures of ``summary.json``, such as ``test/accuracy``; NaN for those that are not finite.
        checkpoint: the best checkpoint, else the last; None: none was saved.
        folder: folder of the run.
    """

    model: nn.Module | None = field(repr=False)
    metrics: dict[str, float]
    checkpoint: Path | None
    folder: Path


def fit(
    config: RunConfig | None = None,
    *,
    model: nn.Module | None = None,
    data: pl.LightningDataModule | None = None,
    task: pl.LightningModule | None = None,
    overrides: Collection[str] = (),
    folder: str | Path | None = None,
    quiet: bool = False,
) -> Result:
    """Trains a model, as ``holotrain fit`` does: saves checkpoints and curves, then tests the best checkpoint.

    Objects replace what the configuration would make; all else is that of the configuration. They are trained in place.

    Args:
        config: from :func:`compose`; None: the default configuration.
        model: any module that the task can train, or a LightningModule, which is its own task.
        data: any LightningDataModule. Attributes ``num_classes``, ``vocab_size``, ``context`` and ``image_shape`` tell the task
            what it must know; else ``overrides`` do, such as ``task.classes=10``.
        task: a LightningModule with its own model; in place of ``model``.
        overrides: as for :func:`compose`, in place of ``config``. ``ckpt_path=...`` continues from a checkpoint, and
            ``resume=true`` with ``folder`` continues the run of that folder; both take the same objects again.
        folder: folder of the run, which must not hold another; None: a new one in ``runs/fit``.
        quiet: print nothing to standard output.

    Raises:
        UserError: a mistake, in one line; or the run ran out of memory; or it is in several processes, for which there is the
            command line.
        KeyboardInterrupt: Ctrl-C stopped the training, after a checkpoint was saved.
    """
    config, run = _run("fit", config, {"model": model, "data": data, "task": task}, overrides, folder, quiet)
    summary = _summary(run)
    checkpoint = Path(summary["checkpoint"]) if summary["checkpoint"] else None
    object_ = config.task.object if config.model is None else config.model.object
    trained = object_ if checkpoint is None else _weights_of(checkpoint, None, object_)
    return Result(trained and trained.cpu().eval(), summary["metrics"], checkpoint, run.folder)


def validate(
    config: RunConfig | None = None,
    *,
    model: nn.Module | None = None,
    data: pl.LightningDataModule | None = None,
    task: pl.LightningModule | None = None,
    overrides: Collection[str] = (),
    folder: str | Path | None = None,
    quiet: bool = False,
) -> dict[str, float]:
    """Evaluates a checkpoint, or pretrained weights, on the validation set, as ``holotrain validate`` does.

    Args:
        config: ``compose("validate", ["ckpt_path=..."])``.
        model, data, task, overrides, folder, quiet: see :func:`fit`. Objects get the weights of the checkpoint.

    Returns:
        The metrics, such as ``val/accuracy``.
    """
    _, run = _run("validate", config, {"model": model, "data": data, "task": task}, overrides, folder, quiet)
    return _summary(run)["metrics"]


def test(
    config: RunConfig | None = None,
    *,
    model: nn.Module | None = None,
    data: pl.LightningDataModule | None = None,
    task: pl.LightningModule | None = None,
    overrides: Collection[str] = (),
    folder: str | Path | None = None,
    quiet: bool = False,
) -> dict[str, float]:
    """Evaluates a checkpoint, or pretrained weights, on the test set, as ``holotrain test`` does; see :func:`validate`."""
    _, run = _run("test", config, {"model": model, "data": data, "task": task}, overrides, folder, quiet)
    return _summary(run)["metrics"]


def predict(config: RunConfig, *, folder: str | Path | None = None, quiet: bool = False) -> Path:
    """Classifies images or texts, or scores texts, as ``holotrain predict`` does.

    Args:
        config: ``compose("predict", ["ckpt_path=...", "images=..."])``.
        folder, quiet: see :func:`fit`.

    Returns:
        The file ``predictions.csv``.
    """
    return _run("predict", config, {}, (), folder, quiet)[1].folder / PREDICTIONS


def generate(config: RunConfig, *, folder: str | Path | None = None, quiet: bool = False) -> list[str]:
    """Continues texts with a causal language model, as ``holotrain generate`` does.

    Args:
        config: ``compose("generate", ["ckpt_path=...", "prompt=..."])``; its ``seed`` decides the samples.
        folder, quiet: see :func:`fit`.

    Returns:
        What follows each prompt, in their order, without the prompt.
    """
    _, run = _run("generate", config, {}, (), folder, quiet)
    lines = (run.folder / GENERATIONS).read_text(encoding="utf-8").split("\n")  # a text may hold other line separators
    return [json.loads(line)["text"] for line in lines if line]


def export(config: ExportConfig, *, folder: str | Path | None = None, quiet: bool = False) -> Path:
    """Writes the model of a checkpoint for other programs, as ``holotrain export`` does.

    Args:
        config: ``compose("export", ["ckpt_path=...", "to=..."])``.
        folder, quiet: see :func:`fit`.

    Returns:
        The folder with ``model.safetensors`` and ``config.json``, for :func:`load`.
    """
    _, run = _run("export", config, {}, (), folder, quiet)
    return Path(config.to) if config.to else run.folder / "export"


def plan(
    config: RunConfig | None = None,
    *,
    model: nn.Module | None = None,
    data: pl.LightningDataModule | None = None,
    task: pl.LightningModule | None = None,
    overrides: Collection[str] = (),
) -> Plan:
    """Predicts the memory of a training without running it, as ``holotrain plan`` does. Writes and prints nothing.

    Args:
        config: from :func:`compose`, of ``plan`` or of ``fit``.
        model, data, task, overrides: see :func:`fit`; the objects are left as they are.

    Raises:
        UserError: a mistake, in one line; or the training cannot be planned.
    """
    if config is not None and type(config) is not COMMANDS["plan"]:
        known = {option.name for option in fields(COMMANDS["plan"])}
        shared = {name: value for name, value in to_container(config).items() if name in known}
        config = structured("plan", shared)
    prepared = _prepared("plan", config, {"model": model, "data": data, "task": task}, overrides)
    with quietly(), redirect_stdout(StringIO()):
        return planned(cast(PlanConfig, prepared))[1]


def load(path: str | Path, trust: str | Collection[str] = (), model: nn.Module | None = None) -> nn.Module:
    """A trained model, on the CPU, in eval mode.

    Args:
        path: a checkpoint, the folder of a run (its best checkpoint, else its last), a folder of ``holotrain export``, or
            ``best`` or ``last``: of the latest training in ``runs``.
        trust: package, or packages, whose classes may be imported, in addition to holotrain's models. Nothing in the file runs
            that is not of them.
        model: takes the weights of the checkpoint and is returned; needed if ``holotrain.fit`` was given one as an object.

    Raises:
        UserError: there is no such file, it is damaged, it holds another model, or it names a class that is not trusted.
    """
    path = checkpoint_path(str(path), "load", "runs")
    return _weights_of(path, [trust] if isinstance(trust, str) else list(trust), model).cpu().eval()


def _weights_of(path: Path, trust: Collection[str] | None, model: nn.Module | None) -> nn.Module:
    if checkpointed.is_exported(path) and model is None:  # also of a model that no command exported
        with as_user_error("load"):
            return saved.load(path, trust or ())
    return described_model(path, trust, model)[0]


def _run(
    command: str, config: RunConfig | None, objects: dict, overrides: Collection[str], folder: str | Path | None, quiet: bool
) -> tuple[RunConfig, Run]:
    if folder is not None and overrides:
        overrides = [*overrides, f"hydra.run.dir={as_word(folder)}"]
    config = _prepared(command, config, objects, overrides)
    if rank_from_environment() is not None:
        raise UserError(f"holotrain.{command} runs in one process; with torchrun start python -m holotrain {command}")
    named = Path(folder or config.folder or run_folder(command, config.output_dir, False))
    folder = relative_to_cwd(named.expanduser().absolute())
    run = Run(command, folder, list(config.overrides), dict(config.choices))
    with quietly(), ExitStack() as silenced:
        if quiet:
            silenced.enter_context(redirect_stdout(StringIO()))
        status = run_job(config, run)
    if status == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if status > 128:
        raise SystemExit(status)
    if status:
        raise (UserError if status == 2 else RuntimeError)(next(iter(run.errors), f"{command} ended with status {status}"))
    return config, run


def _prepared(command: str, config: RunConfig | None, objects: dict[str, object], overrides: Collection[str]) -> RunConfig:
    """The configuration, with the objects in place of what it names."""
    if config is not None and overrides:
        raise UserError("overrides: they belong into compose(...), which made the configuration")
    if config is not None and type(config) is not COMMANDS[command]:
        raise UserError(f"config: {command} takes compose({command!r}, ...), not a {type(config).__name__}")
    objects = _checked_objects(objects)
    kinds = {group: full_name(type(thing)) for group, thing in objects.items()}
    if config is None:
        words = [f"{group}.{TARGET}={PYTHON_OBJECT}" for group in kinds]
        words += [f"{group}.kind='{kind}'" for group, kind in kinds.items()]
        config = compose(command, [*overrides, *words])
    return _with_objects(command, config, objects, kinds) if objects else config


def _checked_objects(objects: dict[str, object]) -> dict[str, object]:
    """Those that are given, by their groups; a LightningModule is its own task. Raises a UserError if one cannot be trained."""
    objects = {group: thing for group, thing in objects.items() if thing is not None}
    for group, thing in objects.items():
        if not isinstance(thing, OBJECTS[group]):
            raise UserError(f"{group}: expected a {OBJECTS[group].__name__}, got {type(thing).__name__}")
    for name in OBJECT_GROUPS["data"].or_auto:
        if getattr(objects.get("data"), name, None) == "auto":
            raise UserError(f"data: {name}='auto' is for data that are named, as in overrides=['data=...']; give a number")
    if isinstance(objects.get("model"), pl.LightningModule):
        objects = {"task": objects.pop("model"), **objects}
    if {"model", "task"} <= objects.keys():
        raise UserError("task: it has its own model; give model= or task=, not both")
    return objects


def _with_objects(command: str, config: RunConfig, objects: dict[str, object], kinds: dict[str, str]) -> RunConfig:
    plain = to_container(config)
    if kinds.keys() & {"model", "task"} and plain["backward"]["kind"] == default_backward(config.model):
        del plain["backward"]["kind"]  # that of the other model
    for group, kind in kinds.items():
        options = (plain[group] or {}).items() if group == "model" else ()
        kept = {name: value for name, value in options if name in MODEL_OPTIONS}
        plain[group] = {TARGET: PYTHON_OBJECT, "kind": kind} | kept
    if config.trainer.strategy != "single":
        raise UserError(
            f"trainer={config.trainer.strategy}: an object is in one process only; use trainer=default, or name its class"
        )
    named = structured(command, plain)
    made = replace(named, **{group: replace(getattr(named, group), object=thing) for group, thing in objects.items()})
    made.overrides, made.folder = config.overrides, config.folder
    made.choices = {group: option for group, option in config.choices.items() if group not in objects}
    return made


def _summary(run: Run) -> dict[str, Any]:
    summary = read_summary(run.folder)
    assert summary is not None  # a run that has ended well leaves one
    return summary | {"metrics": {name: math.nan if value is None else value for name, value in summary["metrics"].items()}}
