"""A run in TensorBoard: options and results under HParams, charts under Custom Scalars. Other loggers get the options."""

import math
import time
from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from tensorboard.compat.proto import summary_pb2
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2
from torch import Tensor

from holotrain.callbacks import (
    DriftMonitor,
    ErrorDiffusionMonitor,
    MemoryMonitor,
    OptimizationMonitor,
    PaddingMonitor,
    SynthesisCallback,
    ThroughputMonitor,
)
from holotrain.callbacks.monitor import replays
from holotrain.commands.run_folder import Run
from holotrain.config.command_options import FitConfig
from holotrain.config.composition import key_of
from holotrain.config.option_groups import PLAIN
from holotrain.config.structured import to_container
from holotrain.dashboard.charts import tensorboard_layout
from holotrain.dashboard.table import UNCOMPARED, flat
from holotrain.error_diffusion import ErrorDiffusionNetwork
from holotrain.error_diffusion.rules import BACKPROPAGATION
from holotrain.tasks.task import monitored_by

# protobuf makes their classes when they are imported
Event: Any = summary_pb2.Summary  # ty: ignore[missing-attribute]
api: Any = api_pb2
plugin_data: Any = plugin_data_pb2

ALWAYS = ("model", "data", "backward", "synthesis", "optimizer", "optimizer.lr", "data.batch_size", "trainer.precision", "seed")
"""Options that HParams lists for every run, in addition to the overridden ones."""

SHOWN = {
    "memory/peak_bytes": "peak memory (bytes)",
    "throughput/tokens_per_second": "tokens/s",
    "throughput/samples_per_second": "samples/s",
}
"""Measurements that HParams lists, and their display names; the first throughput that a training logs."""


class BestValue(pl.Callback):
    """Logs the best value so far of the metric that selects the best checkpoint, as ``best/val/...``.

    Args:
        checkpoint: the callback that selects it. Its state is saved in checkpoints, so a resumed training goes on from there.
    """

    def __init__(self, checkpoint: ModelCheckpoint) -> None:
        self.checkpoint = checkpoint
        self.tag = f"best/{checkpoint.monitor}"
        self.value: float | None = None

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self.value = self.best_so_far(trainer.callback_metrics.get(self.checkpoint.monitor))
        if self.value is not None:
            for logger in trainer.loggers:
                logger.log_metrics({self.tag: self.value}, step=trainer.global_step)

    def best_so_far(self, latest: Tensor | None = None) -> float | None:
        """The best finite value, that of an earlier part of the training and the latest included; None: there is none."""
        known = [value for value in (self.value, self.checkpoint.best_model_score, latest) if value is not None]
        finite = [float(value) for value in known if math.isfinite(value)]
        return (max if self.checkpoint.mode == "max" else min)(finite, default=None)


def log_start(
    loggers: Iterable[Logger],
    trainer: pl.Trainer,
    task: pl.LightningModule,
    config: FitConfig,
    run: Run,
    monitor: ModelCheckpoint | None,
) -> None:
    """Logs the charts and the run's options before it trains, so that a run that is under way or was killed is compared too.

    Args:
        monitor: the callback that selects the best checkpoint.
    """
    options, measured = dict(flat(to_container(config))), tags(trainer, task, config)
    columns = results(task, config, monitor, measured)
    for logger in loggers:
        if not isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(options)
            continue
        if logger in trainer.loggers:  # which Lightning replaces for trainer.fast_dev_run
            logger.experiment.add_custom_scalars(tensorboard_layout(measured))
        # Lightning's log_hyperparams would add a point to the curve of every metric.
        known: dict[str, float | str] = {}
        start = plugin_data.SessionStartInfo(start_time_secs=time.time())
        for name, value in (run.choices | options).items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                known[name] = start.hparams[name].number_value = value
            else:
                known[name] = start.hparams[name].string_value = str(value).lower() if isinstance(value, bool) else str(value)
        _write(logger, metadata.EXPERIMENT_TAG, experiment=experiment(known, run, columns))
        _write(logger, metadata.SESSION_START_INFO_TAG, session_start_info=start)


def log_end(loggers: Iterable[Logger], status: str) -> None:
    """Logs how the run ended.

    Args:
        status: ``completed``, ``interrupted`` or ``failed``. TensorBoard keeps the first status of a run, so an interrupted
            one, which may be resumed, gets none.
    """
    ends = {"completed": api.STATUS_SUCCESS, "failed": api.STATUS_FAILURE}
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger) and status in ends:
            end = plugin_data.SessionEndInfo(status=ends[status], end_time_secs=time.time())
            _write(logger, metadata.SESSION_END_INFO_TAG, session_end_info=end)
        logger.finalize("success" if status == "completed" else "failed")
        if isinstance(logger, WandbLogger):
            logger.experiment.finish(exit_code=int(status != "completed"))  # else the next job of a sweep continues this run


def _write(logger: TensorBoardLogger, tag: str, **content: Any) -> None:
    about = metadata.create_summary_metadata(plugin_data.HParamsPluginData(**content))
    writer = logger.experiment._get_file_writer()
    writer.add_summary(Event(value=[Event.Value(tag=tag, metadata=about, tensor=metadata.NULL_TENSOR)]))
    writer.flush()  # else a run that is killed in its first minutes would have none


def experiment(options: dict[str, float | str], run: Run, metrics: dict[str, str]) -> Any:
    """The columns of HParams. The options that a sweep varies (single run: the overridden ones) are marked as differing.

    TensorBoard shows marked options first, five options and five metrics by default, and takes the columns of all runs from the
    first run that it finds. ``torch.utils.tensorboard.summary.hparams`` can neither mark options nor leave any out.

    Args:
        options: values of the possible columns, by name.
        metrics: tags of scalars and their display names, in order.
    """
    overridden = [name for name in map(key_of, run.overrides) if name.split(".")[0] not in UNCOMPARED]
    marked = run.varied or overridden
    infos = [
        api.HParamInfo(
            name=name,
            type=api.DATA_TYPE_STRING if isinstance(options[name], str) else api.DATA_TYPE_FLOAT64,
            differs=name in marked,
        )
        for name in dict.fromkeys((*overridden, *ALWAYS))
        if name in options
    ]
    columns = [api.MetricInfo(name=api.MetricName(tag=tag), display_name=name) for tag, name in metrics.items()]
    return api.Experiment(hparam_infos=infos, metric_infos=columns)


def results(task: pl.LightningModule, config: FitConfig, monitor: ModelCheckpoint | None, measured: set[str]) -> dict[str, str]:
    """Tags and display names of the scalars that a training will log as its results, in the order of their importance.

    Args:
        measured: from :func:`tags`.
    """
    # There is no monitor without validation.
    validated = [] if monitor is None else list(dict.fromkeys((str(monitor.monitor), *monitored_by(task))))
    tested = config.test and config.trainer.limit_test_batches != 0
    tests = [name.replace("val/", "test/") for name in validated] if tested else []
    best = [f"best/{name}" for name in validated[:1]]
    memory, *speeds = ([tag] if tag in measured else [] for tag in SHOWN)
    found = [*validated[:1], *best, *tests[:1], *memory, *next(filter(None, speeds), []), *validated[1:], *tests[1:]]
    return {tag: SHOWN.get(tag, tag) for tag in found}


def tags(trainer: pl.Trainer, task: pl.LightningModule, config: FitConfig) -> set[str]:
    """The scalars that this training can log and that a chart shows. The callbacks' docstrings describe them."""
    found = {"train/loss", "train/lr"}
    if config.trainer.limit_val_batches != 0:
        found |= monitored_by(task).keys()
    for callback in trainer.callbacks:  # ty: ignore[missing-attribute]
        if isinstance(callback, MemoryMonitor):
            found |= {"memory/peak_bytes", "memory/forward_backward_peak_bytes"}
        elif isinstance(callback, ThroughputMonitor):
            found |= {"throughput/samples_per_second", "throughput/step_seconds"}
            if callback.count_tokens:
                found.add("throughput/tokens_per_second")
            if callback.peak_flops and callback.model_flops_per_sample:
                found.add("throughput/mfu")
        elif isinstance(callback, DriftMonitor):
            if config.backward.kind not in PLAIN and not replays(task):
                found.add("reversible/drift")
        elif isinstance(callback, OptimizationMonitor):
            found |= {"optimization/gradient_norm", "optimization/update_ratio"}
        elif isinstance(callback, SynthesisCallback):
            found |= {f"synthesis/{name}" for name in ("milliseconds", "gradient_cosine", "update_norm", "skipped")}
        elif isinstance(callback, ErrorDiffusionMonitor):
            rules = {module.rule for module in task.modules() if isinstance(module, ErrorDiffusionNetwork)}
            if rules and not replays(task):
                found |= {"error_diffusion/dead_cells", "error_diffusion/sign_violations"}
                found |= {"error_diffusion/alignment"} if rules - {BACKPROPAGATION} else set()
        elif isinstance(callback, PaddingMonitor) and callback.unbucketed is not None:
            found.add("padding/fraction")
    return found
