"""``holotrain fit``: trains, saves the best and the last checkpoint, and tests the best."""

import gc
import math
import sys
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import yaml
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.model_helpers import is_overridden

from holotrain.callbacks.interrupt import Interrupted
from holotrain.callbacks.monitors import log_text
from holotrain.callbacks.trace import TraceProfiler
from holotrain.commands import screen
from holotrain.commands.checkpoint import KeepConfiguration, check_classes, check_continuable, check_same, chosen_before
from holotrain.commands.console import console, log
from holotrain.commands.evaluation import attention_for, check_not_empty, evaluate, lightning_refusals, shared_data
from holotrain.commands.memory_limits import OutOfMemory, as_out_of_memory, chosen, explained, with_smaller_batch
from holotrain.commands.planners import smallest_batch
from holotrain.commands.run_folder import Run
from holotrain.commands.summary import FIGURES, HELPS, SUMMARY, Measured, write_summary
from holotrain.commands.tensorboard_tabs import finish, log_options
from holotrain.config.build import build_task, description
from holotrain.config.build_callbacks import build_fit_callbacks, build_loggers
from holotrain.config.build_trainer import build_trainer, check_division, check_training_device, device_kind, device_name
from holotrain.config.command_options import FitConfig
from holotrain.config.composition import MODES
from holotrain.config.option_groups import TEXT, is_a
from holotrain.config.structured import to_container
from holotrain.errors import UserError, check_choice
from holotrain.folders import write_whole
from holotrain.tasks.task import model_of, monitored_by


def run(config: FitConfig, run: Run) -> int:
    """Trains one model. Returns the exit status: 0, 2 after running out of memory, 128 + n if signal n ended the training."""
    check_training_device(config)
    start = Path(config.ckpt_path) if config.ckpt_path else None
    if config.resume:  # a job of a resumed sweep may not have started
        start = run.last_checkpoint if run.last_checkpoint.exists() else None
    if start is not None:
        check_same(config, start)
        if config.resume:
            config = chosen_before(config, start)
    data = shared_data("fit", smallest_batch(config) if config.batch_is_open else config, start, run)
    if config.trainer.limit_val_batches != 0:
        check_not_empty(data, "val", ", or set trainer.limit_val_batches=0")
    if config.test and config.trainer.limit_test_batches != 0:
        check_not_empty(data, "test", ", or set test=false")
    batch_is_open, (config, planned) = config.batch_is_open, _chosen(config, data, run)
    while True:
        training = _trained(config, data, start, run, planned)
        smaller = None
        if batch_is_open and training.ended_in_its_first_steps:
            smaller = with_smaller_batch(config, data, device_kind(config.trainer.accelerator))
        if smaller is None:
            break
        before, (config, planned) = config.batch_option, smaller
        console.print("out of memory in the first steps with {}={}: trying {}".format(*before, config.batch_option[1]))
        training.remove()
        del training
        gc.collect()  # a Trainer is a reference cycle
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    if run.is_main:
        training.log_end()
    return training.exit_status


def _trained(config: FitConfig, data: pl.LightningDataModule, start: Path | None, run: Run, planned: int | None) -> "Training":
    """A training that has ended."""
    pl.seed_everything(config.seed, verbose=False)
    task = build_task(config, data, begin=start is None)
    if config.trainer.precision == "64-true":
        task.double()  # Lightning (2.6) does so after it has loaded the checkpoint, whose weights would be rounded
    check_division(config.trainer, run.process, model_of(task))
    if start is not None:
        check_continuable(task, config, start)
        check_classes(config, data, start)
    training = Training(config, run, data, task, planned)
    screen.show_start(config, run, model_of(task), start, data)
    if run.is_main:
        training.log_start()
    try:
        training.train_and_test(start)
    except BaseException:
        if run.is_main:
            finish(training.loggers, completed=False)
        raise
    return training


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


class Training:
    """A training with its Trainer, what it writes before and after it, and how it ended.

    Args:
        planned: bytes of a step, if something was chosen by a plan.
    """

    status, exit_status = "completed", 0
    message: str | None = None
    refused: tuple[str, str] | None = None
    """When memory ran out, and the size that was refused."""

    def __init__(
        self, config: FitConfig, run: Run, data: pl.LightningDataModule, task: pl.LightningModule, planned: int | None
    ) -> None:
        self.config, self.run, self.data, self.task, self.planned = config, run, data, task, planned
        self.tested: dict[str, float] = {}
        self.loggers = build_loggers(config, run.folder, run.folder.parent.name if run.varied else None)
        callbacks = build_fit_callbacks(config, run.folder, task, data)
        self.monitor = next((each for each in callbacks if isinstance(each, ModelCheckpoint) and each.monitor), None)
        selecting = (self.monitor.monitor, self.monitor.mode) if self.monitor else (None, None)
        self.metric, self.mode = objective_of(config, task, data) or selecting
        check_direction(self.metric, self.mode, run.direction)
        self.measured = Measured(run.started, config.resume, self.monitor)
        kept = KeepConfiguration(config, run.choices, description(config, data))
        callbacks += [kept, self.measured]
        options = config.trainer
        if config.steps_in_backward:  # and clips there; Lightning would look for gradients after it
            options = options.with_arguments(gradient_clip_val=None)
        batches = len(data.train_dataloader())
        self.trainer = build_trainer(options, run.folder, callbacks, self.loggers, batches, config.profiler, run.process)

    def log_start(self) -> None:
        resolved = yaml.safe_dump(to_container(self.config), sort_keys=False)
        write_whole(self.run.folder / "config.yaml", resolved)
        (self.run.folder / SUMMARY).unlink(missing_ok=True)  # that of an earlier part of the run is not its result
        validated = []  # the metrics of validation, the one that selects the best checkpoint first
        if self.monitor is not None and self.monitor.monitor:
            validated = list(dict.fromkeys([self.monitor.monitor, *monitored_by(self.task)]))
        log_options(self.loggers, self.config, self.run, validated)
        log_text(self.loggers, "configuration", resolved, step=0)

    def train_and_test(self, start: Path | None) -> None:
        """Trains from a checkpoint, if there is one."""
        try:
            with lightning_refusals("fit"), as_out_of_memory(), attention_for(self.data):
                self.trainer.fit(self.task, datamodule=self.data, ckpt_path=start, weights_only=True)
            with as_out_of_memory():
                self._test()
            if self.measured.diverged:
                self.status = "diverged"
                self.message = f"holotrain: the training has diverged: {self.measured.diverged}; {HELPS}"
        except Interrupted as signal:
            self.status, self.exit_status = "interrupted", 128 + signal.signum
            self.message = f"{signal}\n{self.run.how_to_resume}"
        except OutOfMemory as refusal:
            self._out_of_memory(refusal)

    def _test(self) -> None:
        config, data, run = self.config, self.data, self.run
        if not is_tested(config, self.task, data):
            return
        if run.process is not None:  # the strategy may have sharded the trained task
            self.task = build_task(config, data)
        try:
            step = self.trainer.global_step
            self.tested = evaluate(config, run, self.task, data, self._checkpoint(), self.loggers, step)
        except UserError as error:  # the training is not lost
            raise UserError(f"{error}{run.hint()}") from error

    def _out_of_memory(self, refusal: OutOfMemory) -> None:
        when = "during the test" if self.trainer.state.finished else f"at step {self.trainer.global_step + 1}"
        if self.run.process is not None:  # so that the other processes end too
            device = device_name(self.config.trainer.accelerator)
            raise UserError(f"out of memory {when} on {device}; {refusal}") from refusal
        self.status, self.exit_status = "out of memory", 2
        self.refused = when, str(refusal)

    @property
    def ended_in_its_first_steps(self) -> bool:
        """Whether memory ran out before the third step. The second is the first with the states of the optimizer."""
        trained = self.trainer.global_step >= 2 or self.trainer.state.finished
        return self.refused is not None and not trained and not self.config.ckpt_path

    def remove(self) -> None:
        """Ends a training that begins again, and removes what it has written: a run has one set of options."""
        finish(self.loggers, completed=False)
        written = [*self.run.last_checkpoint.parent.glob("*.ckpt")]
        for logger in self.loggers:
            if isinstance(logger, TensorBoardLogger):
                written += Path(logger.log_dir).glob("events.out.tfevents.*")
        for path in written:
            path.unlink()
        self.data.trainer = None  # which holds the model

    def log_end(self) -> None:
        if self.refused is not None:
            self.message = explained(self.config, self.data, self.run, *self.refused)
            self.run.errors.append(self.message.splitlines()[0].removeprefix("holotrain: "))
        model, checkpoint = model_of(self.task), self._checkpoint()
        results = self.measured.results(self.trainer)
        metrics = results["metrics"] | self.tested
        best = None if self.monitor is None else self.measured.best_so_far()
        if self.monitor is not None:
            metrics[f"best/{self.monitor.monitor}"] = math.nan if best is None else best
        figures = results if self.status == "completed" else {}  # one that failed or diverged may have been fast
        score = (metrics | figures).get(self.metric) if self.config.objective else best
        results |= {"metrics": metrics, "monitor": self.metric, "mode": self.mode, "score": score}
        epochs, is_whole = self.trainer.current_epoch, self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        results |= {"epochs": epochs, "whole_epochs": max(epochs - (not is_whole), 0), "steps": self.trainer.global_step}
        results |= {"checkpoint": checkpoint and str(checkpoint), "planned_step_bytes": self.planned}
        stopping = (each for each in self.trainer.callbacks if isinstance(each, EarlyStopping))  # ty: ignore[missing-attribute]
        ended_by = (each.patience for each in stopping if each.stopped_epoch or each.wait_count >= each.patience)
        results["early_stopping_patience"] = next(ended_by, None)
        summary = write_summary(self.run, self.config, model, self.status, **results)
        for logger in self.loggers:
            logger.log_metrics({"seconds": summary.seconds}, step=self.trainer.global_step)
        finish(self.loggers, completed=self.status == "completed")
        profiler: object = self.trainer.profiler  # ty: ignore[missing-attribute]
        expensive = profiler.most_expensive if isinstance(profiler, TraceProfiler) else ()
        screen.show_end(summary, self.run.folder, expensive)
        if self.message:
            print(self.message, file=sys.stderr)
            log.info(self.message)

    def _checkpoint(self) -> Path | None:
        """The best checkpoint, else the last one, else None."""
        last = self.run.last_checkpoint
        best = None if self.monitor is None else self.monitor.best_model_path
        if best and Path(best).exists():
            ours = last.with_name(Path(best).name)
            return ours if ours.exists() else Path(best)  # of the continued run, if none was better since
        return last if last.exists() else None


def is_tested(config: FitConfig, task: pl.LightningModule, data: pl.LightningDataModule) -> bool:
    can_test = is_overridden("test_step", task) and is_overridden("test_dataloader", data)  # those of others
    return can_test and config.test and config.trainer.limit_test_batches != 0


def objective_of(config: FitConfig, task: pl.LightningModule, data: pl.LightningDataModule) -> tuple[str, str] | None:
    """What a sweep optimises instead of the metric that selects the best checkpoint, and ``min`` or ``max``. Raises a UserError
    if the training does not measure it."""
    if config.objective is None:
        return None
    modes = {"train/loss": "min"} | {name: "max" if name.endswith("per_second") else "min" for name in FIGURES}
    if not is_a(config.data, TEXT):
        del modes["tokens_per_second"]
    if config.trainer.limit_val_batches != 0:
        modes |= monitored_by(task)
    if is_tested(config, task, data):
        modes |= {metric.replace("val/", "test/"): mode for metric, mode in monitored_by(task).items()}
    check_choice("objective", config.objective, modes)
    return config.objective, modes[config.objective]


def check_direction(metric: str | None, mode: str | None, direction: str | None) -> None:
    """Raises a UserError if the sweeper searches for the worst values of what it optimises."""
    if direction is None:
        return
    if metric is None or mode is None:
        raise UserError("the sweeper needs a validation metric: use callbacks.checkpoint and trainer.limit_val_batches=1.0")
    better = MODES[mode]
    if direction != better:
        raise UserError(f"hydra.sweeper.direction={direction}: use {better}, the better values of {metric}")
