"""Builds Lightning's Trainer from a configuration."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, SimpleProfiler
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from holotrain.callbacks import TraceProfiler
from holotrain.checks import naming_group
from holotrain.config.build_strategy import build_strategy
from holotrain.config.chosen import Chosen
from holotrain.config.devices import check_device
from holotrain.config.schema.beside import BESIDE
from holotrain.errors import UserError
from holotrain.parallel.checkpoints import CheckpointFiles
from holotrain.parallel.rank import ProcessRank
from holotrain.targets import first_line, made


def build_trainer(
    config: Chosen,
    folder: Path,
    callbacks: list[pl.Callback],
    logger: object,
    batches: int | None = None,
    profiler: str | None = None,
    process: ProcessRank | None = None,
) -> pl.Trainer:
    """A trainer that writes its files to ``folder``.

    Args:
        batches: number of batches per epoch; only needed to train.
        profiler: name of the profiler.
        process: rank and size of this process, if several train together.

    Raises:
        UserError: the device is missing or does not support the precision.
    """
    check_device(config)
    own = {name: value for name, value in config.arguments.items() if name not in BESIDE}
    plugins = own.pop("plugins") or []
    with naming_group("trainer.plugins"):
        changed: dict[str, Any] = {"plugins": [*made(plugins if isinstance(plugins, list) else [plugins]), CheckpointFiles()]}
    changed |= {"strategy": build_strategy(config, process), "devices": 1, "num_nodes": 1}
    if process is not None:
        changed |= {"devices": process.local_size, "num_nodes": process.nodes}
    if profiler is not None:
        changed["profiler"] = _profiler(profiler if process is None or process.is_main else None, folder)
    if process is not None:
        changed["plugins"].append(TorchElasticEnvironment())
    if process is not None and config.precision == "64-true":
        # Lightning's ModelParallelStrategy only accepts it as a plugin.
        changed["precision"] = None
        changed["plugins"].append(DoublePrecision())
    if batches is not None:
        changed |= validation(config, batches)
    changed["enable_progress_bar"] = any(isinstance(callback, ProgressBar) for callback in callbacks)
    try:
        return Chosen(config.target, own).make(default_root_dir=folder, callbacks=callbacks, logger=logger, **changed)
    except (MisconfigurationException, ValueError) as error:
        raise UserError(f"trainer: {first_line(error)}") from error


def validation(config: Chosen, batches: int) -> dict[str, Any]:
    """Lightning's arguments for when to validate: as configured, and at the latest at the end of the training.

    Args:
        batches: number of batches per epoch, before limit_train_batches.
    """
    limit = 1.0 if config.limit_train_batches is None else config.limit_train_batches
    interval = 1.0 if config.val_check_interval is None else config.val_check_interval
    batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    asked = {"val_check_interval": interval, "check_val_every_n_epoch": config.check_val_every_n_epoch}
    if not batches or config.overfit_batches or config.fast_dev_run:
        return asked
    steps_an_epoch = -(-batches // config.accumulate_grad_batches)
    last = config.max_epochs * batches if (config.max_epochs or 0) > 0 else None
    if config.max_steps > 0:
        whole, rest = divmod(config.max_steps, steps_an_epoch)
        needed = whole * batches + rest * config.accumulate_grad_batches
        last = needed if last is None else min(last, needed)
    if isinstance(interval, int):
        return {"val_check_interval": min(interval, last or interval), "check_val_every_n_epoch": None}
    if last is not None and last < batches * config.check_val_every_n_epoch * interval:
        return {"val_check_interval": last, "check_val_every_n_epoch": None}
    return asked


def _profiler(name: str | None, folder: Path) -> Profiler | None:
    if name == "trace":
        return TraceProfiler(folder)
    kind = {None: None, "simple": SimpleProfiler, "advanced": AdvancedProfiler}[name]
    return kind and kind(dirpath=folder, filename="profile")
