"""``holotrain validate`` and ``test``: evaluates a checkpoint, as the end of ``fit`` does too, or pretrained weights."""

from collections.abc import Iterable
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger

from holotrain.callbacks.monitors import log_figure
from holotrain.commands import screen
from holotrain.commands.prepare import attention_for, lightning_refusals, load_weights, prepare, prepared_task
from holotrain.commands.run import Run, write_summary
from holotrain.config import checkpointed
from holotrain.config.build_callbacks import build_loggers, build_matrices
from holotrain.config.build_trainer import build_trainer
from holotrain.config.command_options import CheckpointConfig, RunConfig
from holotrain.errors import UserError
from holotrain.tasks.task import model_of

PARTS = {"validate": "val", "test": "test"}
"""The part of the data that a command evaluates with."""


def run(config: CheckpointConfig, run: Run) -> int:
    """Writes the metrics into summary.json, and to the loggers at the step of the checkpoint."""
    limit = f"limit_{PARTS[run.command]}_batches"
    if getattr(config.trainer, limit) == 0:  # may come from the checkpoint's training
        raise UserError(f"trainer.{limit}=0: there is nothing to evaluate; use trainer.{limit}=1.0")
    config, data, path = prepare(config, run)
    task = prepared_task(config, run, data, path)
    screen.show_start(config, run, model_of(task), path, data)
    loggers = build_loggers(config, run.folder)
    metrics = evaluate(config, run, task, data, path, loggers)
    for logger in loggers:
        logger.finalize("success")
    summary = write_summary(run, config, model_of(task), checkpoint=path and str(path), metrics=metrics)
    screen.show_end(summary, run.folder)
    return 0


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
            log_figure(loggers, f"{PARTS[split]}/confusion_matrix", matrix.figure, step)
    return metrics
