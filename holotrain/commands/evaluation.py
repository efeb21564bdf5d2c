"""``holotrain validate`` and ``test``: evaluates a checkpoint, as the end of ``fit`` does too, or pretrained weights."""

from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from traceback import walk_tb
from typing import Any, cast

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.connectors import checkpoint_connector
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.nn.attention import sdpa_kernel

from holotrain.callbacks.monitors import log_figure
from holotrain.checkpoints.exact_resume import ExactResume
from holotrain.commands import screen
from holotrain.commands.checkpoint import check_classes, check_same, load_weights, tokenizer_for
from holotrain.commands.run_folder import Run
from holotrain.commands.summary import write_summary
from holotrain.config import checkpointed
from holotrain.config.build import build_data, build_task
from holotrain.config.build_callbacks import build_loggers, build_matrices
from holotrain.config.build_trainer import build_trainer, check_device, check_division
from holotrain.config.command_options import CheckpointConfig, RunConfig
from holotrain.data.images import ImageDataModule
from holotrain.data.loader import LoadingModule
from holotrain.data.text.module import TextDataModule
from holotrain.errors import UserError
from holotrain.models.generation import WITHOUT_PLANS
from holotrain.parallel.processes import FOREVER
from holotrain.targets import first_line, is_of
from holotrain.tasks.task import model_of

SPLITS = {"validate": "val", "test": "test"}
"""The parts of the data, by the command that evaluates with them."""


def evaluate(
    config: RunConfig,
    run: Run,
    task: pl.LightningModule,
    data: pl.LightningDataModule,
    path: Path | None,
    loggers: Iterable[Logger],
    step: int = 0,
) -> dict[str, float]:
    """Evaluates the weights of ``path`` (None: the task's own, at ``step``) and returns the metrics. The loggers get them and,
    of a classification, the confusion matrix, at the step of the weights. (Lightning would log them at step 0.)"""
    split = "validate" if run.command == "validate" else "test"
    if path is not None:
        load_weights(task, path)
        step = checkpointed.load(path).get("global_step", 0)
    matrices = build_matrices(config)
    trainer = build_trainer(config.trainer, run.folder, [*matrices], False, process=run.process)
    measure = trainer.validate if split == "validate" else trainer.test
    with lightning_refusals(split), attention_for(data):
        metrics = dict(next(iter(measure(task, datamodule=data, verbose=False)), {}))
    for logger in loggers:
        logger.log_metrics(metrics, step=step)
    for matrix in matrices:
        if matrix.figure is not None:
            log_figure(loggers, f"{SPLITS[split]}/confusion_matrix", matrix.figure, step)
    return metrics


def attention_for(data: pl.LightningDataModule | None, texts: bool = False) -> AbstractContextManager:
    """A context without cuDNN's attention, which would build a plan for each length, if batches of text differ in length, as
    those of files (``texts``) do."""
    varies = texts or (isinstance(data, TextDataModule) and data.layout != "packed")
    return sdpa_kernel(WITHOUT_PLANS) if varies else nullcontext()


@contextmanager
def lightning_refusals(command: str) -> Generator[None]:
    """
    Raises:
        UserError: Lightning refuses to begin: a LightningModule or data of others have no step or loader for this command, or
            a fraction of the batches is less than one batch. Or a part of a checkpoint cannot be restored.
    """
    try:
        yield
    except MisconfigurationException as error:
        raise UserError(f"{command}: {first_line(error)}") from error
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if not _comes_from_a_checkpoint(error):
            raise
        said = f"it lacks {error}" if isinstance(error, KeyError) else first_line(error)
        raise UserError(f"ckpt_path: the checkpoint is damaged, or of another training: {said}") from error


RESTORING = (checkpoint_connector.__name__, ExactResume.__module__)
"""Modules whose functions named ``restore...`` restore the parts of a checkpoint."""

READERS = ("holotrain", "lightning", "random", "torch.cuda.random", "torch.optim", "torch.random")
"""Where an error of these parts is raised. Those of a user's own hooks, and of other processes, are raised elsewhere."""


def _comes_from_a_checkpoint(error: Exception) -> bool:
    """Whether an error arose while a part of a checkpoint was restored, and not in a user's code or another process."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    names = [(frame.f_globals.get("__name__", ""), frame.f_code.co_name.lstrip("_")) for frame in frames]
    restores = any(module in RESTORING and name.startswith("restore") for module, name in names)
    return restores and is_of(names[-1][0], READERS)


def check_not_empty(data: pl.LightningDataModule, split: str, instead: str = "") -> None:
    """Raises a UserError, which says what else helps (``instead``), if the data have no image to validate or test with.
    Lightning would warn, and go on without metrics."""
    if not isinstance(data, ImageDataModule) or is_overridden(f"{split}_dataloader", data, ImageDataModule):
        return
    if not len(data.split(split)):  # ty: ignore[invalid-argument-type]: torch declares none
        raise UserError(f"data: no image is left for {split}; raise data.val_fraction{instead}")


def shared_data(stage: str, config: RunConfig, checkpoint: Path | None, run: Run) -> pl.LightningDataModule:
    """The data, set up for a stage of a run that starts from the checkpoint. Raises a UserError if there is a mistake in the
    data, or two processes have different data."""
    data = build_data(config, tokenizer_for(config, checkpoint))
    process = run.process
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


def prepared(command: str, config: CheckpointConfig, run: Run) -> tuple[pl.LightningDataModule, pl.LightningModule]:
    """The data, set up for the command, and the task. The weights of a checkpoint are not loaded yet, pretrained ones are.
    Raises a UserError if the checkpoint does not fit, or the device or the data are missing."""
    path = config.checkpoint if config.ckpt_path else None
    check_device(config.trainer)
    if path is not None:
        check_same(config, path)
    data = shared_data(command, config, path, run)
    if command in SPLITS:
        check_not_empty(data, SPLITS[command])
    if path is not None:
        check_classes(config, data, path)
    pl.seed_everything(config.seed, verbose=False)
    task = build_task(config, data, begin=path is None)
    check_division(config.trainer, run.process, model_of(task))
    return data, task


def run(config: CheckpointConfig, run: Run) -> int:
    """Writes the metrics into summary.json, and to the loggers at the step of the checkpoint."""
    split = run.command
    limit = f"limit_{SPLITS[split]}_batches"
    if getattr(config.trainer, limit) == 0:  # may come from the checkpoint's training
        raise UserError(f"trainer.{limit}=0: there is nothing to evaluate; use trainer.{limit}=1.0")
    path = config.checkpoint if config.ckpt_path else None  # None: the pretrained weights of the configuration
    data, task = prepared(split, config, run)
    screen.show_start(config, run, model_of(task), path, data)
    loggers = build_loggers(config, run.folder)
    metrics = evaluate(config, run, task, data, path, loggers)
    for logger in loggers:
        logger.finalize("success")
    summary = write_summary(run, config, model_of(task), checkpoint=path and str(path), metrics=metrics)
    screen.show_end(summary, run.folder)
    return 0
