"""Measuring a checkpoint: what ``validate``, ``test`` and the end of ``fit`` share."""

import time
from pathlib import Path
from typing import Literal

import lightning.pytorch as pl

from holotrain.commands import screen
from holotrain.commands.checkpoint import load_weights
from holotrain.commands.run import Run
from holotrain.commands.summary import Summary
from holotrain.config.build import build_data, build_task
from holotrain.config.build_trainer import build_progress, build_trainer, check_device
from holotrain.config.schema import RunConfig
from holotrain.data import ImageDataModule
from holotrain.errors import UserError

Split = Literal["validate", "test"]


def evaluate(
    split: Split,
    config: RunConfig,
    run: Run,
    task: pl.LightningModule,
    data: ImageDataModule,
    path: Path | None,
    loggers: list | bool = False,
) -> dict[str, float]:
    """Measures the weights of ``path`` (None: the task's own) on one part of the data, and returns the metrics."""
    if path is not None:
        load_weights(task, path)
    trainer = build_trainer(config.trainer, run.folder, [], loggers)
    measure = trainer.validate if split == "validate" else trainer.test
    return measure(task, datamodule=data, verbose=False)[0]


def needed_checkpoint(config: RunConfig, command: str) -> Path:
    """
    Raises:
        UserError: no checkpoint is given.
    """
    if not config.ckpt_path:
        raise UserError(f"ckpt_path: {command} needs a checkpoint; give ckpt_path=runs/fit/.../checkpoints/last.ckpt")
    return Path(config.ckpt_path)


def measure_checkpoint(split: Split, config: RunConfig, run: Run) -> int:
    """The whole of ``holotrain validate`` and ``holotrain test``."""
    started = time.monotonic()
    path = needed_checkpoint(config, split)
    check_device(config.trainer)
    pl.seed_everything(config.seed, verbose=False)
    data = build_data(config.data, config.seed)
    task = build_task(config, data)
    data.prepare_data()
    data.setup(split)
    screen.show_start(split, config, run.choices, task.model, run.folder, path)
    metrics = evaluate(split, config, run, task, data, path)
    summary = Summary(
        command=split,
        status="completed",
        overrides=run.overrides,
        device=screen.device_name(config.trainer.accelerator),
        precision=config.trainer.precision,
        backward=config.backward.kind,
        synthesis="none",
        parameters=screen.parameter_count(task.model),
        seconds=time.monotonic() - started,
        metrics=metrics,
        checkpoint=str(path),
    )
    summary.write(run.folder)
    screen.show_end(summary, run.folder)
    return 0
