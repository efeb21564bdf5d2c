"""What a command begins with: its checkpoint must be that of its configuration, its data are read, its task is built.

A command that reads no data takes the model of a checkpoint alone: :func:`described_model`.
"""

import warnings
from collections.abc import Collection, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from inspect import signature
from itertools import zip_longest
from pathlib import Path
from traceback import walk_tb
from typing import Any, cast

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.trainer.connectors import checkpoint_connector
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.nn.attention import sdpa_kernel

from holotrain.callbacks import SynthesisCallback
from holotrain.checkpoints.exact_resume import ExactResume
from holotrain.commands.memory import smallest_batch
from holotrain.commands.run import Run
from holotrain.config import checkpointed
from holotrain.config.build import build_data, build_task, check_device, check_division, class_names, train_part, why_no_graphs
from holotrain.config.command_options import Config, FitConfig, RunConfig
from holotrain.config.composition import key_of
from holotrain.config.option_groups import HUGGING_FACE, PYTHON_OBJECT, TEXT, is_a
from holotrain.config.structured import to_container
from holotrain.data.images import ImageDataModule
from holotrain.data.loader import LoadingModule, left_out
from holotrain.data.text.module import TextDataModule
from holotrain.data.tokenizers import tokenizer_text, with_template_of
from holotrain.errors import UserError, as_user_error
from holotrain.models import checkpoint_files, saved
from holotrain.models.adapters import merge_peft
from holotrain.models.external import allocated
from holotrain.models.generation import WITHOUT_PLANS
from holotrain.models.huggingface_files import folder_of, tokenizer_of
from holotrain.models.quantised import bits_of, dequantise, quantise
from holotrain.numeric import bits_in, counted
from holotrain.parallel.processes import FOREVER
from holotrain.parallel.rank import ProcessRank
from holotrain.targets import TARGET, blaming, first_line, is_defined_in, is_of, targets
from holotrain.tasks.task import model_of


def prepare(config: Config, run: Run) -> tuple[Config, pl.LightningDataModule, Path | None]:
    """What a command that reads data begins with.

    Returns:
        the configuration (of a resumed run with what was chosen automatically at its start); the data, set up for the command,
        with the smallest batch if its size is still to be chosen; the checkpoint that the run starts from, or None.

    Raises:
        UserError: the device or the data are missing, or the checkpoint is of another configuration.
    """
    start, resumes = Path(config.ckpt_path) if config.ckpt_path else None, isinstance(config, FitConfig) and config.resume
    if resumes:  # a job of a resumed sweep may not have started
        start = run.last_checkpoint if run.last_checkpoint.exists() else None
    check_device(config.trainer)
    if isinstance(config, FitConfig) and config.trainer.graphs is True and (reason := why_no_graphs(config)) is not None:
        raise UserError(f"trainer.graphs: {reason}; set it to false")
    if start is not None:
        check_same(config, start, FOR_ANY_USE)
        config = chosen_before(config, start) if resumes else config
    data = shared_data(run.command, smallest_batch(config), start, run.process)
    check_not_empty(config, data, run.command)
    if isinstance(config, FitConfig) and start is None:
        config = with_even_batches(config, run, data)
    if start is not None:
        check_classes(config, data, start)
        if isinstance(config, FitConfig):
            tell_of_other_data(data, start)
    return config, data, start


def prepared_task(config: RunConfig, run: Run, data: pl.LightningDataModule, start: Path | None) -> pl.LightningModule:
    """The task of a run, seeded, with pretrained weights; those of the checkpoint are not loaded yet. Raises a UserError if
    training cannot continue from the checkpoint, or its processes cannot share the model."""
    pl.seed_everything(config.seed, verbose=False)
    task = build_task(config, data, begin=start is None)
    check_division(config.trainer, run.process, model_of(task))
    if isinstance(config, FitConfig) and start is not None:
        check_continuable(task, config, start)
    return task


def check_not_empty(config: RunConfig, data: pl.LightningDataModule, command: str) -> None:
    """Raises a UserError if the data have no image to measure with. Lightning would warn, and go on without metrics."""
    if not isinstance(data, ImageDataModule):
        return
    parts = {"fit": ("val", "test") if getattr(config, "test", True) else ("val",), "validate": ("val",), "test": ("test",)}
    for part in parts.get(command, ()):
        limit, ours = f"limit_{part}_batches", not is_overridden(f"{part}_dataloader", data, ImageDataModule)
        is_read = ours and getattr(config.trainer, limit) != 0
        if is_read and not len(data.split(part)):  # ty: ignore[invalid-argument-type]: torch declares none
            raise UserError(f"data: no image is left for {part}; raise data.val_fraction, or set trainer.{limit}=0")


def shared_data(
    stage: str, config: RunConfig, checkpoint: Path | None, process: ProcessRank | None = None
) -> pl.LightningDataModule:
    """The data, set up for a stage of a run that starts from the checkpoint. Raises a UserError if there is a mistake in the
    data, or two processes have different data."""
    data = build_data(config, tokenizer_for(config, checkpoint))
    # The first process of a machine prepares the data, which may take long; the others read what it has prepared.
    group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=FOREVER)) if process is not None else None
    if process is not None and process.local_rank:
        dist.barrier(group)
    data.prepare_data()
    if process is not None and not process.local_rank:
        dist.barrier(group)
    data.setup(stage)
    if process is None or not isinstance(data, LoadingModule):  # a module of others may give each process a share
        return data
    fingerprints: list[Any] = [None] * process.size
    dist.all_gather_object(fingerprints, data.fingerprint())
    for rank, theirs in enumerate(fingerprints):
        for name, value in fingerprints[0].items():
            if theirs.get(name) != value:
                said = f"{name}: {theirs.get(name)} in rank {rank}, {value} in rank 0"
                raise UserError(f"data: rank {rank} has other data than rank 0; {said}")
    return data


MOST_LEFT_OUT = 0.1
"""Share of the training samples that an epoch may leave out with a default batch size."""


def with_even_batches(config: Config, run: Run, data: pl.LightningDataModule) -> Config:
    """The configuration, with smaller batches where those that nobody has chosen leave out much of each epoch."""
    chosen = "experiment" in run.choices or any(key_of(word) == "data.batch_size" for word in run.overrides)
    if chosen or config.batch_is_open or config.batch_option[0] != "data.batch_size":
        return config
    left, share = left_out(data)
    if left <= MOST_LEFT_OUT * share:
        return config
    size = data.batch_size  # ty: ignore[missing-attribute]
    even = share // (share // size + 1)
    warnings.warn(
        f"data.batch_size: {even} in place of the default, {size}, which leaves {left} of {share} samples out of an epoch",
        stacklevel=2,
    )
    data.batch_size = even  # ty: ignore[missing-attribute]
    return config.with_batch(even)


FOR_ANY_USE = (f"task.{TARGET}", "model.quantised")
FOR_TRAINING = (
    "seed",
    "model.pretrained",
    "model.trained",
    "model.freeze",
    "model.adapters",
    f"optimizer.{TARGET}",
    f"scheduler.{TARGET}",
    "synthesis.mode",
)
"""Options that must be those of the checkpoint."""


def check_same(config: RunConfig, path: Path, options: Collection[str]) -> None:
    """Raises a UserError if one of the options is not that of the checkpoint."""
    trained, plain = checkpointed.metadata(path)["config"], to_container(config)
    for option in options:
        group, _, name = option.partition(".")
        before, now = ((each[group] or {}).get(name) if name else each[group] for each in (trained, plain))
        if before != now:
            before, now = ("null" if each is None else each for each in (before, now))
            said = f"{option.removesuffix(f'.{TARGET}')}={now}: {path} was trained with {before}; leave the option out. For "
            export = f"a new training holotrain export ckpt_path={path} to=FOLDER writes it whole, for model.pretrained=FOLDER"
            raise UserError(said + export)


def chosen_before(config: Config, path: Path) -> Config:
    """The configuration of a resumed run. What was chosen automatically keeps the values that were chosen at the start."""
    before = checkpointed.metadata(path)["config"]
    if config.batch_is_open:
        config = config.with_batch(before["data"][config.batch_option[0].removeprefix("data.")])
    blocks = list(before["backward"]["blocks"])
    if config.backward.open and blocks:  # the tile was chosen with them
        backward = replace(config.backward, blocks=blocks, tile=before["backward"].get("tile"))
        config = replace(config, backward=backward)
    return config


def check_classes(config: RunConfig, data: pl.LightningDataModule, path: Path) -> None:
    """Raises a UserError if the classes of the data are not those of the checkpoint."""
    before, now = checkpointed.metadata(path)["description"].get("class_names"), class_names(config, data)
    if before != now:
        unlike = next(((a, b) for a, b in zip_longest(before or (), now or ()) if a != b), (before, now))
        one, other = ("no more" if name is None else repr(name) for name in unlike)
        raise UserError(f"data: {path} was trained on other classes: {one} there, {other} in these data")


def fingerprint_of(data: pl.LightningDataModule) -> dict[str, Any]:
    """What a checkpoint keeps of the data; {} of a module of others."""
    return data.fingerprint() if isinstance(data, LoadingModule) else {}


def tell_of_other_data(data: pl.LightningDataModule, path: Path) -> None:
    """Warns if the data are not those that the checkpoint was trained on."""
    before, now = checkpointed.metadata(path)["data"], fingerprint_of(data)
    unlike = [name for name in now if name in before and before[name] != now[name]]
    if unlike:
        said = "; ".join(f"{name} {before[name]} -> {now[name]}" for name in unlike)
        warnings.warn(
            f"data: not those of {path}: {said}. What was held out for validation there may be trained on now", stacklevel=2
        )


def tokenizer_for(config: RunConfig, path: Path | None) -> str | None:
    """The tokenizer of the checkpoint or of the pretrained weights that a run starts from, as text of ``to_json``. None: the
    tokenizer of the configuration.

    Raises:
        UserError: the configuration names another tokenizer than the checkpoint, or one of the files cannot be read.
    """
    if not is_a(config.data, TEXT) or config.data.target == PYTHON_OBJECT:
        return None
    if path is not None:
        metadata, name = checkpointed.metadata(path), config.data.tokenizer
        before = metadata["config"]["data"]["tokenizer"]
        if name != before:
            raise UserError(f"data.tokenizer={name}: {path} was trained with {before or 'byte'}; leave the option out")
        return metadata["description"]["tokenizer"]
    if config.data.tokenizer is not None:
        return None
    if is_a(config.model, HUGGING_FACE):
        with as_user_error("model.name"):
            name, download = config.model.arguments["name"], config.model.download
            found = tokenizer_of(name, download)
            return None if found is None else with_template_of(folder_of(name, download), found)
    pretrained = getattr(config.model, "pretrained", None)
    if not pretrained:
        return None
    if (Path(pretrained) / saved.TOKENIZER).is_file():
        return with_template_of(Path(pretrained), tokenizer_text(Path(pretrained) / saved.TOKENIZER))
    try:
        return checkpointed.metadata(Path(pretrained), to_build=True)["description"].get("tokenizer")
    except UserError:  # weights of other programs have no tokenizer
        return None


def check_continuable(task: pl.LightningModule, config: FitConfig, path: Path) -> None:
    """Raises a UserError if training cannot continue from the checkpoint, such as that of another model or optimizer."""
    if checkpointed.is_exported(path):
        raise UserError(f"ckpt_path: {path} holds only weights; start from them with model.pretrained={path}")
    checkpoint, most = checkpointed.load(path), config.trainer.max_epochs or -1
    check_same(config, path, FOR_TRAINING)
    try:
        for weights in (checkpoint["state_dict"], checkpoint.get("current_model_state", {})):
            if weights:  # the second are those that are trained, if the first are their averages
                with _of_the_same_model(path):
                    checkpoint_files.require_same(task.state_dict(), weights)
        loop = checkpoint["loops"]["fit_loop"]
        done = loop["epoch_progress"]["current"]["processed"]  # counts an epoch that max_steps has cut short
        whole = loop["epoch_loop.batch_progress"]["is_last_batch"]
        is_trained = done > most > 0 or (done == most and whole and not config.resume)
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"ckpt_path: {path} does not hold the whole state of a training; it cannot continue from it") from error
    if is_trained:
        raise UserError(f"trainer.max_epochs={most}: {path} has trained {counted(done, 'epoch')}; to train on, give more")


def described_model(
    path: Path, trust: Collection[str] | None = None, model: nn.Module | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a checkpoint or of an exported folder, with its weights, and its description. No data are needed.

    Args:
        trust: packages whose own classes may be called, in addition to holotrain's models; None: what the file names may be,
            because :func:`~holotrain.config.command_line.start_checkpoint` has checked it.
        model: takes the weights of a checkpoint; None: a new one of the class that the checkpoint names.

    Raises:
        UserError: it cannot be read, or names a class that is not trusted.
    """
    metadata = checkpointed.metadata(path, to_build=trust is not None)
    description = metadata["description"]
    vouched = checked_names(description) if trust is None else ()
    if checkpointed.is_exported(path):
        with as_user_error("ckpt_path"):
            return saved.load(path, trust or (), vouched), description
    if description["target"] == PYTHON_OBJECT and model is None:
        raise UserError(
            f"ckpt_path: {path} holds the weights of a {description['arguments'].get('kind')} that Python code made; give one "
            "to holotrain.load(..., model=...)"
        )
    trained = metadata["config"]["model"]  # None: the task has no model
    for _, target in targets((trained or {}).get("adapters")):
        if trust is not None and target != checkpointed.ADAPTERS and not is_defined_in(str(target), trust):
            raise UserError(f"ckpt_path: {path} names {target!r} as model.adapters; only {checkpointed.ADAPTERS} is trusted")
    prefix, weights = "" if trained is None else "model.", checkpointed.weights(path)
    weights = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
    if model is None:
        with as_user_error("ckpt_path"), blaming(f"{path} describes no model that can be built"):
            model = saved.build(description["target"], description["arguments"], trust or (), vouched, weights)
            options = trained or {}
            quantised, adapters = options.get("quantised"), options.get("adapters", 0)
            frozen = (options.get("trained", "all"), options.get("freeze", ())) if quantised else ("all", ())
            with allocated():
                train_part(model, frozen[0], adapters, quantised, frozen[1])
    with _of_the_same_model(path):
        checkpoint_files.load_weights(model, weights, path)
    return model, description


def checked_names(description: dict[str, Any]) -> set[tuple[str, str]]:
    """The classes that a description names, with their places: those of the configuration, which are trusted."""
    return {*targets({TARGET: description["target"], **description["arguments"]})}


def _of_the_same_model(path: Path) -> AbstractContextManager[None]:
    return as_user_error(f"ckpt_path: {path} holds another model")


def as_exported(model: nn.Module, quantised: str | None) -> None:
    """Makes the weights of a model those of an export, in place: whole, with layers of peft merged, or all in few bits. Raises
    a UserError if torchao, which these need, is missing."""
    merge_peft(model)
    dequantise(model)
    if quantised:
        with as_user_error("quantised"):
            quantise(model.requires_grad_(False), bits_in(quantised))


def load_weights(task: pl.LightningModule, path: Path) -> None:
    """Loads the weights of a checkpoint (their average, if the run kept one) or of an exported folder into the task. Raises a
    UserError if the checkpoint cannot be read, or holds another model."""
    if not checkpointed.is_exported(path):
        weights = checkpointed.weights(path)
        with _of_the_same_model(path):
            checkpoint_files.load_weights(task, weights, path)
        return
    with as_user_error("ckpt_path"):
        model = saved.load(path, vouched=checked_names(checkpointed.metadata(path)["description"]))
        if (bits := bits_of(model)) is not None:
            quantise(model_of(task).requires_grad_(False), bits)
    with _of_the_same_model(path):
        checkpoint_files.load_weights(model_of(task), model.state_dict(), path)


def attention_for(data: pl.LightningDataModule | None, texts: bool = False) -> AbstractContextManager:
    """A context without cuDNN's attention, which would build a plan for each length, if batches of text differ in length, as
    those of files (``texts``) do."""
    varies = texts or (isinstance(data, TextDataModule) and data.layout != "packed")
    return sdpa_kernel(WITHOUT_PLANS) if varies else nullcontext()


@contextmanager
def lightning_refusals(command: str) -> Generator[None]:
    """
    Raises:
        UserError: Lightning, or a callback of ours, refuses to begin (a LightningModule has no step for this command, a
            synthesis covers nothing), or a part of a checkpoint cannot be restored.
    """
    try:
        yield
    except MisconfigurationException as error:
        raise UserError(f"{command}: {first_line(error)}") from error
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        names = [(frame.f_globals.get("__name__", ""), frame.f_code.co_name.lstrip("_")) for frame in frames]
        begins = not {"configure_optimizers", "on_fit_start"}.isdisjoint(name for _, name in names)
        if isinstance(error, ValueError) and begins and is_of(names[-1][0], ["holotrain"]):
            of_synthesis = SynthesisCallback.__module__ in [module for module, _ in names]
            own = ("synthesis", signature(SynthesisCallback).parameters) if of_synthesis else (command,)
            with as_user_error(*own):
                raise
        restores = any(module in RESTORING and name.startswith("restore") for module, name in names)
        if not restores or not is_of(names[-1][0], READERS):
            raise
        said = f"it lacks {error}" if isinstance(error, KeyError) else first_line(error)
        raise UserError(f"ckpt_path: the checkpoint is damaged, or of another training: {said}") from error


RESTORING = (checkpoint_connector.__name__, ExactResume.__module__)
"""Modules whose functions named ``restore...`` restore the parts of a checkpoint."""

READERS = ("holotrain", "lightning", "random", "torch.cuda.random", "torch.optim", "torch.random")
"""Where an error of these parts is raised. Those of a user's own hooks, and of other processes, are raised elsewhere."""
