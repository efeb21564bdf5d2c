"""A run in TensorBoard: options and results under HParams, charts under Custom Scalars. Other loggers get the options."""

from collections.abc import Iterable

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from torch.utils.tensorboard.summary import hparams

from holotrain.commands.run_folder import Run
from holotrain.config.command_options import FitConfig
from holotrain.config.composition import key_of
from holotrain.config.option_groups import ERROR_DIFFUSION, PLAIN, is_a
from holotrain.config.structured import to_container
from holotrain.dashboard.charts import tensorboard_layout
from holotrain.dashboard.table import UNCOMPARED, flat
from holotrain.tasks.task import monitored_by


def log_hyperparams(loggers: Iterable[Logger], task: pl.LightningModule, config: FitConfig, run: Run, best: str | None) -> None:
    """Logs the options and the names of the results before a run trains, so that one that was killed is compared too.

    Args:
        best: the metric that selects the best checkpoint; None: there is no validation.
    """
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
