"""The commands as Python functions, for scripts and notebooks: ``holotrain.fit``, ``load``, ``plan``, ...

They hand over to what the command line runs. A model or a data module may be an object. A mistake raises a one-line UserError.
"""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import wraps
from io import StringIO
from pathlib import Path
from threading import RLock
from typing import Any, ParamSpec, TypeVar

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.utils.data import DataLoader

from holotrain.commands.evaluation import PREDICTIONS
from holotrain.commands.generate import GENERATIONS
from holotrain.commands.multiprocess import run_job
from holotrain.commands.plan import planned
from holotrain.commands.prepare import described_model
from holotrain.commands.run import Run, read_summary
from holotrain.commands.screen import quietly
from holotrain.config import checkpointed
from holotrain.config.command_line import compose
from holotrain.config.command_options import COMMANDS, ExportConfig, RunConfig
from holotrain.config.composition import key_of
from holotrain.config.option_groups import PYTHON_OBJECT, full_name
from holotrain.errors import UserError, as_user_error
from holotrain.folders import as_word, checkpoint_path, relative_to_cwd, run_folder
from holotrain.models import saved
from holotrain.parallel.rank import rank_from_environment
from holotrain.planning.memory_plan import Plan
from holotrain.targets import TARGET


@dataclass(frozen=True)
class Result:
    """What a training leaves: its folder; the best checkpoint, else the last (None: none was saved); the metrics of
    ``summary.json``, NaN where they are not finite; and the model with the weights of the checkpoint, in eval mode, on the CPU.
    That is the object which ``holotrain.fit`` was given, if it was given one; without a checkpoint otherwise None."""

    model: nn.Module | None = field(repr=False)
    metrics: dict[str, float]
    checkpoint: Path | None
    folder: Path


P = ParamSpec("P")
R = TypeVar("R")

Data = pl.LightningDataModule | DataLoader | Mapping[str, DataLoader]

_commands = RLock()


def _in_one_thread(command: Callable[P, R]) -> Callable[P, R]:
    """Refuses a command while another thread runs one: both would change warnings, Hydra's state and the standard output."""

    @wraps(command)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _commands.acquire(blocking=False):
            raise UserError("a command of holotrain runs in another thread; start this one in a process of its own")
        try:
            return command(*args, **kwargs)
        finally:
            _commands.release()

    return alone


@_in_one_thread
def fit(
    config: RunConfig | None = None,
    *,
    model: nn.Module | None = None,
    data: Data | None = None,
    callbacks: pl.Callback | Collection[pl.Callback] | None = None,
    logger: Logger | Collection[Logger] | None = None,
    overrides: Collection[str] = (),
    folder: str | Path | None = None,
    quiet: bool = False,
) -> Result:
    """Trains a model, as ``holotrain fit`` does: saves checkpoints and curves, then tests the best checkpoint.

    Args:
        config: from :func:`compose`; None: the defaults, with ``overrides`` and the objects, which are trained in place.
        model: any module that the task can train, or a LightningModule, which is its own task: how long it trains must be
            given, as ``trainer.max_epochs``, ``max_steps`` or ``max_time``, and no gradient is clipped unless that is.
        data: any LightningDataModule, or DataLoaders: one to train, or ``{"train": ..., "val": ..., "test": ...}``. Attributes
            ``num_classes``, ``vocab_size``, ``context`` and ``image_shape`` of a module tell the task what it must know; else
            ``overrides`` do, such as ``task.classes=10``.
        callbacks, logger: of Lightning, one or several, as its Trainer takes them; they stand beside those of the configuration
            (which ``overrides=["callbacks.throughput=null", "logger=none"]`` take out), in the test too. None is saved.
        overrides: as for :func:`compose`. ``ckpt_path=...`` continues from a checkpoint, and ``resume=true`` with ``folder``
            continues the run of that folder; both take the same objects again.
        folder: folder of the run, which must not hold another; None: a new one in ``runs/fit``.
        quiet: print nothing to standard output.

    Raises a UserError also if memory ran out, or if the run is in several processes, for which there is the command line.
    """
    run = _run("fit", _configured("fit", config, model, data, overrides, folder), folder, quiet, callbacks, logger)
    checkpoint = (read_summary(run.folder) or {})["checkpoint"]
    trained = model if checkpoint is None else described_model(Path(checkpoint), None, model)[0]
    return Result(trained and trained.cpu().eval(), _metrics(run), checkpoint and Path(checkpoint), run.folder)


@_in_one_thread
def validate(
    config: RunConfig | None = None,
    *,
    model: nn.Module | None = None,
    data: Data | None = None,
    callbacks: pl.Callback | Collection[pl.Callback] | None = None,
    logger: Logger | Collection[Logger] | None = None,
    overrides: Collection[str] = (),
    folder: str | Path | None = None,
    quiet: bool = False,
) -> dict[str, float]:
    """Evaluates a checkpoint (``compose("validate", ["ckpt_path=..."])``), or pretrained weights, on the validation set, as
    ``holotrain validate`` does, and returns the metrics. The arguments are those of :func:`fit`."""
    config = _configured("validate", config, model, data, overrides, folder)
    return _metrics(_run("validate", config, folder, quiet, callbacks, logger))


@_in_one_thread
def test(
    config: RunConfig | None = None,
    *,
    model: nn.Module | None = None,
    data: Data | None = None,
    callbacks: pl.Callback | Collection[pl.Callback] | None = None,
    logger: Logger | Collection[Logger] | None = None,
    overrides: Collection[str] = (),
    folder: str | Path | None = None,
    quiet: bool = False,
) -> dict[str, float]:
    """Evaluates on the test set; see :func:`validate`."""
    config = _configured("test", config, model, data, overrides, folder)
    return _metrics(_run("test", config, folder, quiet, callbacks, logger))


@_in_one_thread
def predict(config: RunConfig, *, folder: str | Path | None = None, quiet: bool = False) -> Path:
    """Classifies images or texts, or scores texts: ``compose("predict", ["ckpt_path=...", "images=..."])``. Returns the CSV."""
    return _run("predict", _configured("predict", config), folder, quiet).folder / PREDICTIONS


@_in_one_thread
def generate(config: RunConfig, *, folder: str | Path | None = None, quiet: bool = False) -> list[str]:
    """Continues texts with a causal language model: ``compose("generate", ["ckpt_path=...", "prompt=..."])``. Returns what
    follows each prompt; ``seed`` decides the samples."""
    run = _run("generate", _configured("generate", config), folder, quiet)
    lines = (run.folder / GENERATIONS).read_text(encoding="utf-8").split("\n")  # a text may hold other line separators
    return [json.loads(line)["text"] for line in lines if line]


@_in_one_thread
def export(config: ExportConfig, *, folder: str | Path | None = None, quiet: bool = False) -> Path:
    """Writes a model for other programs: ``compose("export", ["ckpt_path=...", "to=..."])``. Returns the folder."""
    run = _run("export", _configured("export", config), folder, quiet)
    return Path(config.to) if config.to else run.folder / "export"


@_in_one_thread
def plan(
    config: RunConfig | None = None,
    *,
    model: nn.Module | None = None,
    data: Data | None = None,
    overrides: Collection[str] = (),
) -> Plan:
    """Predicts the memory of a training, as ``holotrain plan`` does, but writes and prints nothing. The arguments are those of
    :func:`fit`; the objects are left as they are. Raises a UserError if the training cannot be planned."""
    with quietly(), redirect_stdout(StringIO()):
        return planned(_configured("plan", config, model, data, overrides))[1]


def load(path: str | Path, trust: str | Collection[str] = (), model: nn.Module | None = None) -> nn.Module:
    """A trained model, on the CPU, in eval mode.

    Args:
        path: a checkpoint, the folder of a run (its best checkpoint, else its last) or of an export; or ``best`` or ``last``:
            those of the latest training in ``runs``.
        trust: packages whose classes may be imported, beside holotrain's models. Nothing else that the file names runs.
        model: takes the weights of the checkpoint and is returned; needed if ``holotrain.fit`` was given one as an object.

    Raises:
        UserError: there is no such file, it is damaged, it holds another model, or it names a class that is not trusted.
    """
    path, trust = checkpoint_path(str(path), "load", "runs"), [trust] if isinstance(trust, str) else [*trust]
    if model is not None or not checkpointed.is_exported(path):
        return described_model(path, trust, model)[0].cpu().eval()
    with as_user_error("load"):  # also a model that no command exported
        return saved.load(path, trust).cpu().eval()


OF_NO_RECIPE = ("trainer.gradient_clip_val=null", "trainer.max_epochs=-1")
"""What a LightningModule of a program's own begins with: the recipes are of our tasks. It is refused without a limit."""


def _configured(command: str, config: Any, model: Any = None, data: Any = None, words: Any = (), folder: Any = None) -> Any:
    """The configuration of a command, with the objects that are given; a LightningModule is its own task."""
    if config is not None and type(config) is not COMMANDS[command]:
        raise UserError(f"config: {command} takes compose({command!r}, ...), not a {type(config).__name__}")
    data = _module_of(data)
    if not isinstance(model, nn.Module | None) or not isinstance(data, pl.LightningDataModule | None):
        raise UserError("expected a Module as model= and a LightningDataModule or DataLoaders as data=")
    if (library := type(model).__module__.partition(".")[0]) in ("transformers", "peft"):
        raise UserError(
            f"model: {type(model).__name__} of {library} takes other arguments than a task of ours gives; name its folder as "
            "in overrides=['model=huggingface', 'model.name=FOLDER'], or give a LightningModule that calls it"
        )
    group = "task" if isinstance(model, pl.LightningModule) else "model"
    objects = {name: thing for name, thing in ((group, model), ("data", data)) if thing is not None}
    if config is not None:
        if words or objects:
            raise UserError("overrides: they belong into compose(...), which made config; objects go with overrides")
        return config
    if "auto" in (getattr(data, "batch_size", None), getattr(data, "max_tokens", None)):
        raise UserError("data: batch_size='auto' is for data that are named, as in overrides=['data=...']; give a number")
    words = [*words, *([f"hydra.run.dir={as_word(folder)}"] if folder is not None and words else [])]
    if "task" in objects and not {"ckpt_path", "experiment", "resume"} & {*map(key_of, words)}:
        words = [*OF_NO_RECIPE[: 2 if command == "fit" else 1], *words]
    for name, thing in objects.items():
        words += [f"{name}.{TARGET}={PYTHON_OBJECT}", f"{name}.kind='{full_name(type(thing))}'"]
    config = compose(command, words)
    if objects and config.trainer.strategy != "single":
        raise UserError(f"trainer={config.trainer.strategy}: an object is in one process only; use trainer=default")
    for name, thing in objects.items():
        setattr(config, name, replace(getattr(config, name), object=thing))
    return config


def _module_of(data: Any) -> Any:
    """A data module of loaders, of one to train or of a mapping; what else is given stays as it is."""
    loaders = {"train": data} if isinstance(data, DataLoader) else data
    if not isinstance(loaders, Mapping) or not {"train"} <= {*loaders} <= {"train", "val", "test"}:
        return data
    module = pl.LightningDataModule()
    for part, loader in loaders.items():
        setattr(module, f"{part}_dataloader", lambda loader=loader: loader)
    return module


def _run(
    command: str, config: RunConfig, folder: str | Path | None, quiet: bool, callbacks: Any = None, logger: Any = None
) -> Run:
    if rank_from_environment() is not None:
        raise UserError(f"holotrain.{command} runs in one process; with torchrun start python -m holotrain {command}")
    theirs, loggers = _several("callbacks", callbacks, pl.Callback), _several("logger", logger, Logger)
    named = Path(folder or config.folder or run_folder(command, config.output_dir, False))
    named = relative_to_cwd(named.expanduser().absolute())
    run = Run(command, named, [*config.overrides], dict(config.choices), callbacks=theirs, loggers=loggers)
    with quietly(), redirect_stdout(StringIO()) if quiet else nullcontext():
        status = run_job(config, run)
    if status > 128:
        raise KeyboardInterrupt if status == 128 + signal.SIGINT else SystemExit(status)
    if status:
        raise (UserError if status == 2 else RuntimeError)(next(iter(run.errors), f"{command} ended with status {status}"))
    return run


def _several(name: str, given: Any, kind: type) -> list[Any]:
    """One object or several. Raises a UserError if one is not a ``kind``."""
    several = [] if given is None else list(given) if isinstance(given, Collection) else [given]
    for each in several:
        if not isinstance(each, kind):
            found = f"the class {each.__name__}" if isinstance(each, type) else full_name(type(each))
            raise UserError(f"{name}: expected a {kind.__name__} of lightning.pytorch, or a list of them, not {found}")
    return several


def _metrics(run: Run) -> dict[str, float]:
    found = (read_summary(run.folder) or {})["metrics"]  # which a run that has ended well leaves
    return {name: math.nan if value is None else value for name, value in found.items()}
