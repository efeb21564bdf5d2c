"""``holotrain fit``: trains, saves the best and the last checkpoint, and tests the best."""

import math
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.tensorboard.summary import hparams

from holotrain.callbacks.drawing import log_text
from holotrain.callbacks.interrupt import Interrupted
from holotrain.commands import screen
from holotrain.commands.checkpoint import KeepConfiguration, check_classes, check_continuable, check_same, chosen_before
from holotrain.commands.evaluation import check_not_empty, evaluate, lightning_refusals, shared_data
from holotrain.commands.failures import OutOfMemory, SameFolder, as_out_of_memory, of_the_system
from holotrain.commands.measured import BestValue, Measured
from holotrain.commands.memory_limits import chosen, explained
from holotrain.commands.planners import smallest_batch
from holotrain.commands.run_folder import Run
from holotrain.commands.summary import SUMMARY, Summary, write_summary
from holotrain.commands.writing import write_whole
from holotrain.config.build import build_task, description
from holotrain.config.build_callbacks import build_fit_callbacks, build_loggers
from holotrain.config.build_trainer import build_trainer, check_division, check_training_device, device_kind, device_name
from holotrain.config.command_options import FitConfig
from holotrain.config.composition import MODES, key_of
from holotrain.config.option_groups import ERROR_DIFFUSION, is_a
from holotrain.config.structured import to_container
from holotrain.dashboard.charts import tensorboard_layout
from holotrain.dashboard.table import UNCOMPARED, flat
from holotrain.errors import UserError
from holotrain.reversible.stack import kept_between_blocks
from holotrain.schedules import PLAIN
from holotrain.tasks.task import model_of, monitored_by


def run(config: FitConfig, run: Run) -> int:
    """Trains one model. Returns the exit status: 0, 2 after running out of memory, 128 + n if signal n ended the training."""
    check_training_device(config)
    start_checkpoint = Path(config.ckpt_path) if config.ckpt_path else None
    if config.resume:  # a job of a resumed sweep may not have started
        start_checkpoint = run.last_checkpoint if run.last_checkpoint.exists() else None
    if start_checkpoint is not None:
        check_same(config, start_checkpoint)
        if config.resume:
            config = chosen_before(config, start_checkpoint)
    data = shared_data("fit", smallest_batch(config) if config.batch_is_open else config, start_checkpoint, run)
    if config.trainer.limit_val_batches != 0:
        check_not_empty(data, "val", ", or set trainer.limit_val_batches=0")
    if config.test and config.trainer.limit_test_batches != 0:
        check_not_empty(data, "test", ", or set test=false")
    config, planned = _chosen(config, data, run)
    pl.seed_everything(config.seed, verbose=False)
    task = build_task(config, data, begin=start_checkpoint is None)
    if config.trainer.precision == "64-true":
        task.double()  # Lightning (2.6) does so after it has loaded the checkpoint, whose weights would be rounded
    check_division(config.trainer, run.process, model_of(task))
    if start_checkpoint is not None:
        check_continuable(task, config, start_checkpoint)
        check_classes(config, data, start_checkpoint)

    place = SameFolder(run.folder)
    loggers = build_loggers(config.logger, run.folder, run.folder.parent.name if run.varied else None)
    callbacks = [
        *build_fit_callbacks(config, run.folder, task, data),
        KeepConfiguration(config, run.choices, description(config, data)),
        Measured(config.resume),
        place,
    ]
    monitor = next((c for c in callbacks if isinstance(c, ModelCheckpoint) and c.monitor), None)
    check_direction(monitor, run.direction)
    if monitor is not None:
        callbacks.append(BestValue(monitor))
    batches = len(data.train_dataloader())
    options = config.trainer
    if config.steps_in_backward:  # and clips there; Lightning would look for gradients after it
        options = options.with_arguments(gradient_clip_val=None)
    trainer = build_trainer(options, run.folder, callbacks, loggers, batches, config.profiler, run.process)
    resolved = yaml.safe_dump(to_container(config), sort_keys=False)
    screen.show_start(config, run, model_of(task), start_checkpoint, data)
    if run.is_main:
        write_whole(run.folder / "config.yaml", resolved)
        (run.folder / SUMMARY).unlink(missing_ok=True)  # that of an earlier part of the run is not its result
        log_hyperparams(loggers, task, config, run, None if monitor is None else monitor.monitor)
        log_text(loggers, "configuration", ["config.yaml"], [[resolved]], step=0)
    status, exit_status, words, tested = "completed", 0, None, {}
    try:
        with lightning_refusals("fit"), as_out_of_memory():
            trainer.fit(task, datamodule=data, ckpt_path=start_checkpoint, weights_only=True)
        with as_out_of_memory():
            can_test = is_overridden("test_step", task) and is_overridden("test_dataloader", data)  # those of others
            if config.test and config.trainer.limit_test_batches != 0 and can_test:
                if run.process is not None:  # the strategy may have sharded the trained task
                    task = build_task(config, data)
                try:
                    tested = evaluate(config, run, task, data, _checkpoint(run, trainer), loggers, trainer.global_step)
                except UserError as error:  # the training is not lost
                    raise UserError(f"{error}{run.hint()}") from error
    except Interrupted as signal:
        status, exit_status = "interrupted", 128 + signal.signum
        words = f"{signal}\n{run.how_to_resume}"
    except OutOfMemory as refusal:
        status, exit_status = "out of memory", 2
        when = "during the test" if trainer.state.finished else f"at step {trainer.global_step + 1}"
        if run.process is not None:  # so that the other processes end too
            if run.is_main:
                log_end(loggers, completed=False)
            raise UserError(f"out of memory {when} on {device_name(config.trainer.accelerator)}; {refusal}") from refusal
        words = explained(config, data, run, when, str(refusal))
        run.errors.append(words.splitlines()[0].removeprefix("holotrain: "))
    except BaseException as error:
        if run.is_main:
            with suppress(OSError):  # the disk may be full, or the folder gone
                log_end(loggers, completed=False)
            if of_the_system(error):
                place.check()
        raise
    if not run.is_main:
        return exit_status
    place.check()
    summary = _summary(config, run, trainer, task, tested, status=status, planned_step_bytes=planned)
    log_end(loggers, completed=status == "completed")
    screen.show_end(summary, run.folder)
    if words:
        print(words, file=sys.stderr)
    return exit_status


def _chosen(config: FitConfig, data: pl.LightningDataModule, run: Run) -> tuple[FitConfig, int | None]:
    """The configuration with its ``auto`` options filled in, equal in all processes, and the bytes that were planned. Updates
    the batch size of ``data``."""
    choose = partial(chosen, config, data, device_kind(config.trainer.accelerator))
    if run.process is None or not (config.batch_is_open or config.backward.open):
        return choose()
    planned = None
    if run.is_main:
        config, planned = choose(processes=run.process.local_size)
    shared = [config]
    dist.broadcast_object_list(shared)
    config = shared[0]
    option, size = config.batch_option
    setattr(data, option.removeprefix("data."), size)
    return config, planned


def _summary(config: FitConfig, run: Run, trainer: pl.Trainer, task: pl.LightningModule, tested: dict, **more: Any) -> Summary:
    callbacks = {type(callback): callback for callback in trainer.callbacks}  # ty: ignore[missing-attribute]
    results = callbacks[Measured].results(trainer)
    if best := callbacks.get(BestValue):
        value = best.best_so_far()
        results |= {"monitor": best.checkpoint.monitor, "mode": best.checkpoint.mode}
        results["metrics"][best.tag] = math.nan if value is None else value
    results["metrics"] |= tested
    checkpoint = _checkpoint(run, trainer)
    results |= {"checkpoint": str(checkpoint) if checkpoint else None, "between_blocks": kept_between_blocks(model_of(task))}
    results |= {"epochs": trainer.current_epoch, "steps": trainer.global_step}
    return write_summary(run, config, model_of(task), **results, **more)


def check_direction(monitor: ModelCheckpoint | None, direction: str | None) -> None:
    """Raises a UserError if the sweeper searches for the worst values of the metric that selects the best checkpoint."""
    if direction is None:
        return
    if monitor is None:
        raise UserError("the sweeper needs a validation metric: use callbacks.checkpoint and trainer.limit_val_batches=1.0")
    better = MODES[monitor.mode]
    if direction != better:
        raise UserError(f"hydra.sweeper.direction={direction}: use {better}, the better values of {monitor.monitor}")


def _checkpoint(run: Run, trainer: pl.Trainer) -> Path | None:
    """The best checkpoint, else the last one, else None."""
    best = next((c.best_model_path for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.monitor), "")
    if best and Path(best).exists():
        ours = run.last_checkpoint.with_name(Path(best).name)
        return ours if ours.exists() else Path(best)  # of the continued run, if none was better since
    return run.last_checkpoint if run.last_checkpoint.exists() else None


def log_hyperparams(loggers: Iterable[Logger], task: pl.LightningModule, config: FitConfig, run: Run, best: str | None) -> None:
    """Logs the options and, for TensorBoard, the charts and the names of the results, before a run trains, so that one that was
    killed is compared too. ``best`` is the metric that selects the best checkpoint; None: there is no validation."""
    options = dict(flat(to_container(config)))
    validated = [] if best is None else list(dict.fromkeys([best, *monitored_by(task)]))
    results = [*validated, *(f"best/{name}" for name in validated[:1])]
    results += [name.replace("val/", "test/") for name in validated if config.test]
    results += ["memory/peak_bytes", "throughput/samples_per_second"]
    known = {name: value for name, value in (run.choices | options).items() if name.split(".")[0] not in UNCOMPARED}
    first = [name for name in (*run.varied, *map(key_of, run.overrides)) if name in known]  # TensorBoard shows a few columns
    numbers = {name: value for name, value in known.items() if isinstance(value, int | float) and not isinstance(value, bool)}
    columns = dict.fromkeys(first) | {name: str(value) for name, value in known.items()} | numbers
    optional = {
        "reversible": config.backward.kind not in PLAIN,
        "synthesis": config.synthesis is not None,
        "error_diffusion": is_a(config.task, ERROR_DIFFUSION),
        "padding": config.batch_option[0] == "data.max_tokens",
    }
    charts = {"train", "memory", "throughput", "optimization", *(name for name, logged in optional.items() if logged)}
    for logger in loggers:
        if not isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(options)
            continue
        logger.experiment.add_custom_scalars(tensorboard_layout(charts, {*validated}))
        # Lightning's log_hyperparams(columns, results) would add a point to the curve of every metric.
        for event in hparams(columns, dict.fromkeys(results, 0.0))[:2]:
            logger.experiment._get_file_writer().add_summary(event)
        logger.experiment.flush()  # else a run that is killed in its first minutes would have none


def log_end(loggers: Iterable[Logger], completed: bool) -> None:
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger) and completed:
            logger.experiment._get_file_writer().add_summary(hparams({}, {})[2])
        logger.finalize("success" if completed else "failed")
        if isinstance(logger, WandbLogger):
            logger.experiment.finish(exit_code=int(not completed))  # else the next job of a sweep continues this run
