"""A run in TensorBoard: options and results under HParams, charts under Custom Scalars. Other loggers get the options."""

import math
from collections.abc import Iterable

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from torch import Tensor
from torch.utils.tensorboard.summary import hparams

from holotrain.commands.run_folder import Run
from holotrain.config.command_options import FitConfig
from holotrain.config.composition import key_of
from holotrain.config.option_groups import ERROR_DIFFUSION, PLAIN, is_a
from holotrain.config.structured import to_container
from holotrain.dashboard.charts import tensorboard_layout
from holotrain.dashboard.table import UNCOMPARED, flat
from holotrain.tasks.task import monitored_by

MEASURED = ("memory/peak_bytes", "throughput/samples_per_second")


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


def log_start(loggers: Iterable[Logger], task: pl.LightningModule, config: FitConfig, run: Run, monitor: str | None) -> None:
    """Logs the charts and the run's options before it trains, so that a run that is under way or was killed is compared too.

    Args:
        monitor: the metric that selects the best checkpoint; None: there is no validation.
    """
    options = dict(flat(to_container(config)))
    validated = [] if monitor is None else list(dict.fromkeys([monitor, *monitored_by(task)]))
    tested = [name.replace("val/", "test/") for name in validated] if config.test else []
    results = [*validated, *(f"best/{name}" for name in validated[:1]), *tested, *MEASURED]
    known = {name: value for name, value in (run.choices | options).items() if name.split(".")[0] not in UNCOMPARED}
    first = [name for name in (*run.varied, *map(key_of, run.overrides)) if name in known]  # TensorBoard shows a few columns
    columns = dict.fromkeys(first) | known
    for name, value in columns.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            columns[name] = str(value)
    for logger in loggers:
        if not isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(options)
            continue
        logger.experiment.add_custom_scalars(tensorboard_layout(_prefixes(config), {*validated}))
        # Lightning's log_hyperparams, which writes the same, would add a point to the curve of every metric.
        for event in hparams(columns, dict.fromkeys(results, 0.0))[:2]:
            logger.experiment._get_file_writer().add_summary(event)
        logger.experiment.flush()  # else a run that is killed in its first minutes would have none


def _prefixes(config: FitConfig) -> set[str]:
    """The beginnings of the tags that a training logs, apart from those of validation."""
    optional = {
        "reversible": config.backward.kind not in PLAIN,
        "synthesis": config.synthesis is not None,
        "error_diffusion": is_a(config.task, ERROR_DIFFUSION),
        "padding": config.batch_option[0] == "data.max_tokens",
    }
    return {"train", "memory", "throughput", "optimization", *(name for name, logged in optional.items() if logged)}


def log_end(loggers: Iterable[Logger], completed: bool) -> None:
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger) and completed:
            logger.experiment._get_file_writer().add_summary(hparams({}, {})[2])
        logger.finalize("success" if completed else "failed")
        if isinstance(logger, WandbLogger):
            logger.experiment.finish(exit_code=int(not completed))  # else the next job of a sweep continues this run
