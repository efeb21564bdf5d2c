"""``holotrain fit``: trains, saves the best and the last checkpoint, and tests the best.

``run`` reads: prepare, choose_memory, train, test, write. Lightning takes over in ``train``, at ``trainer.fit``.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import lightning.pytorch as pl
import yaml
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.model_helpers import is_overridden

from holotrain.callbacks.interrupt import Interrupted
from holotrain.callbacks.measured import HELPS, Measured
from holotrain.callbacks.monitors import log_text
from holotrain.callbacks.tensorboard_tabs import finish, finished_if_it_fails, log_options
from holotrain.callbacks.trace import TraceProfiler
from holotrain.commands import screen
from holotrain.commands.evaluation import evaluate
from holotrain.commands.memory import choose_memory
from holotrain.commands.prepare import attention_for, fingerprint_of, lightning_refusals, prepare, prepared_task
from holotrain.commands.run import SUMMARY, Run, write_summary
from holotrain.commands.sweep import check_direction, objective_of
from holotrain.config.build import build_callbacks, build_loggers, build_task, build_trainer, description, device_name
from holotrain.config.checkpointed import KEY, run_metadata
from holotrain.config.command_options import FitConfig
from holotrain.config.composition import key_of
from holotrain.config.option_groups import ERROR_DIFFUSION, is_a
from holotrain.config.structured import to_container
from holotrain.errors import UserError
from holotrain.folders import write_whole
from holotrain.planning.devices import OutOfMemory, as_out_of_memory
from holotrain.schedules import PLAIN, kind_of
from holotrain.tasks.task import model_of, monitored_by


@dataclass
class Outcome:
    """A training, and how it ended; ``metrics``: those of the test."""

    config: FitConfig
    run: Run
    data: pl.LightningDataModule
    task: pl.LightningModule
    trainer: pl.Trainer
    loggers: list[Logger]
    measured: Measured
    objective: tuple[str | None, str | None]
    status: str = "completed"
    exit_status: int = 0
    message: str | None = None
    error: Exception | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def monitor(self) -> ModelCheckpoint | None:
        """What selects the best checkpoint."""
        return self.measured.monitor

    @property
    def checkpoint(self) -> Path | None:
        """The best checkpoint, else the last one, else None."""
        last = self.run.last_checkpoint
        best = None if self.monitor is None else self.monitor.best_model_path
        if best and Path(best).exists():
            ours = last.with_name(Path(best).name)
            return ours if ours.exists() else Path(best)  # of the continued run, if none was better since
        return last if last.exists() else None


def run(config: FitConfig, run: Run) -> int:
    """Trains one model. Returns the exit status: 0, 2 after running out of memory, 128 + n if signal n ended the training. What
    else has ended it, such as an error of a callback, is raised when the summary is written."""
    config, data, start = prepare(config, run)
    config, planned = choose_memory(config, data, run)
    outcome = train(config, run, data, start)
    test(outcome)
    if run.is_main:
        write(outcome, planned)
    if outcome.error is not None:
        raise outcome.error
    return outcome.exit_status


def train(config: FitConfig, run: Run, data: pl.LightningDataModule, start: Path | None) -> Outcome:
    """Builds the task, the callbacks and the Trainer, and trains, from a checkpoint if there is one."""
    task = prepared_task(config, run, data, start)
    if config.trainer.precision == "64-true":
        task.double()  # Lightning (2.6) does so after it has loaded the checkpoint, whose weights would be rounded
    loggers = build_loggers(config, run.folder, run.folder.parent.name if run.varied else None, run.loggers)
    callbacks = build_callbacks(config, run.folder, task, data, run.callbacks)
    monitor = next((each for each in callbacks if isinstance(each, ModelCheckpoint) and each.monitor), None)
    selecting = (str(monitor.monitor), monitor.mode) if monitor else None
    objective = objective_of(config, task, is_tested(config, task, data)) or selecting
    check_direction(objective, run.direction)
    entries = {KEY: run_metadata(config, run.choices, description(config, data), fingerprint_of(data))}
    measured = Measured(run.started, config.resume, monitor, entries)
    options = config.trainer
    if config.steps_in_backward:  # and clips there; Lightning would look for gradients after it
        options = options.with_arguments(gradient_clip_val=None)
    batches = len(data.train_dataloader())
    if run.is_main:  # not before: an optimizer may be refused until then
        callbacks.append(LambdaCallback(on_train_start=lambda *_: write_options(outcome)))
    trainer = build_trainer(options, run.folder, [*callbacks, measured], loggers, batches, config.profiler, run.process)
    outcome = Outcome(config, run, data, task, trainer, loggers, measured, objective or (None, None))

    screen.show_start(config, run, model_of(task), start, data)
    with finished_if_it_fails(loggers):
        try:
            with lightning_refusals("fit"), as_out_of_memory(), attention_for(data):
                trainer.fit(task, datamodule=data, ckpt_path=start, weights_only=True)
            if measured.diverged:
                outcome.status = "diverged"
                outcome.message = f"holotrain: the training has diverged: {measured.diverged}; {HELPS}"
        except Interrupted as signal:
            outcome.status, outcome.exit_status = "interrupted", 128 + signal.signum
            outcome.message = f"{signal}\n{run.how_to_resume}"
        except OutOfMemory as refusal:
            ran_out_of_memory(outcome, refusal, f"at step {trainer.global_step + 1}")
        except Exception as error:
            if isinstance(error, UserError) or run.process is not None or not trainer.global_step:  # so that the others end too
                raise
            outcome.status, outcome.error = "failed", error
            outcome.message = (
                f"holotrain: a {type(error).__name__} ended the training at step {trainer.global_step}{run.hint()}"
            )
    return outcome


def test(outcome: Outcome) -> None:
    """Tests the best checkpoint of a training that has ended by itself."""
    config, run, task, data = outcome.config, outcome.run, outcome.task, outcome.data
    if outcome.status not in ("completed", "diverged") or not is_tested(config, task, data):
        return
    with finished_if_it_fails(outcome.loggers):
        if run.process is not None:  # the strategy may have sharded the trained task
            task = build_task(config, data)
        step = outcome.trainer.global_step
        try:
            with as_out_of_memory():
                outcome.metrics = evaluate(config, run, task, data, outcome.checkpoint, outcome.loggers, step)
        except OutOfMemory as refusal:
            ran_out_of_memory(outcome, refusal, "during the test")
        except UserError as error:  # the training is not lost
            raise UserError(f"{error}{run.hint()}") from error


def write(outcome: Outcome, planned: int | None) -> None:
    """Writes summary.json, closes the loggers and shows the last screen. ``planned``: bytes of a step by the plan."""
    config, run, trainer = outcome.config, outcome.run, outcome.trainer
    results, (metric, mode) = outcome.measured.results(trainer), outcome.objective
    results["metrics"] |= outcome.metrics
    figures = results if outcome.status == "completed" else {}  # one that failed or diverged may have been fast
    score = None if outcome.monitor is None else outcome.measured.best_so_far()
    if config.objective:
        score = (results["metrics"] | figures).get(metric)
    results |= {"monitor": metric, "mode": mode, "score": score, "planned_step_bytes": planned}
    results["checkpoint"] = outcome.checkpoint and str(outcome.checkpoint)
    summary = write_summary(run, config, model_of(outcome.task), outcome.status, **results)
    for logger in outcome.loggers:
        logger.log_metrics({"seconds": summary.seconds}, step=trainer.global_step)
    finish(outcome.loggers, completed=outcome.status == "completed")
    profiler: object = trainer.profiler  # ty: ignore[missing-attribute]
    expensive = profiler.most_expensive if isinstance(profiler, TraceProfiler) else ()
    screen.show_end(summary, run.folder, expensive, getattr(outcome.task, "graphs", None))
    if outcome.message:
        print(outcome.message, file=sys.stderr)
        screen.log.info(outcome.message)


def write_options(outcome: Outcome) -> None:
    """Writes config.yaml, and logs the options before the first step, so that a run that was killed is compared too."""
    config, run, monitor = outcome.config, outcome.run, outcome.monitor
    resolved = yaml.safe_dump(to_container(config), sort_keys=False)
    write_whole(run.folder / "config.yaml", resolved)
    (run.folder / SUMMARY).unlink(missing_ok=True)  # that of an earlier part of the run is not its result
    validated = [] if monitor is None else list(dict.fromkeys([str(monitor.monitor), *monitored_by(outcome.task)]))
    logged = {"reversible": kind_of(config.backward.kind) not in PLAIN, "synthesis": config.synthesis is not None}
    logged["error_diffusion"] = is_a(config.task, ERROR_DIFFUSION)
    first = run.varied or [key_of(word) for word in run.overrides]
    log_options(outcome.loggers, to_container(config), run.choices, first, bool(run.varied), validated, logged)
    log_text(outcome.loggers, "configuration", resolved, step=0)


def ran_out_of_memory(outcome: Outcome, requested: OutOfMemory, when: str) -> None:
    """Raises a UserError if there are several processes, so that the others end too."""
    run, (option, size) = outcome.run, outcome.config.batch_option
    batch = "" if size is None else f" with {option}={size}"  # data of others may have no such option
    tried = f": tried to allocate {requested}" if str(requested) else ""
    said = f"out of memory {when}{batch} on {device_name(outcome.config.trainer.accelerator)}{tried}"
    if run.process is not None:
        raise UserError(said) from requested
    resume = "no checkpoint was saved yet; callbacks.checkpoint.every_n_train_steps=... saves during an epoch"
    if run.last_checkpoint.exists():
        resume = f"add what needs less memory, and {run.how_to_resume}"
    less = "smaller batches, backward=reversible or checkpoint, and trainer.precision=bf16-mixed need less memory"
    outcome.status, outcome.exit_status, outcome.message = "out of memory", 2, f"holotrain: {said}\n{resume}\n{less}"
    run.errors.append(said)


def is_tested(config: FitConfig, task: pl.LightningModule, data: pl.LightningDataModule) -> bool:
    can_test = is_overridden("test_step", task) and is_overridden("test_dataloader", data)  # those of others
    return can_test and config.test and config.trainer.limit_test_batches != 0
