"""Logs a run's options and final metrics, for TensorBoard's HParams and other loggers."""

from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger
from tensorboard.compat.proto.summary_pb2 import Summary as Event
from tensorboard.compat.proto.summary_pb2 import SummaryMetadata
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2
from torch.utils.tensorboard.summary import hparams

from holotrain.commands.run import Run
from holotrain.commands.summary import Summary
from holotrain.config import checkpointed
from holotrain.config.schema import RunConfig

ALWAYS = ("model", "data", "backward", "synthesis", "optimizer", "optimizer.lr", "data.batch_size", "trainer.precision", "seed")
"""Options that HParams lists for every run, in addition to the overridden ones."""

MUTE = ("hydra", "output_dir", "resume", "logger")
"""Overrides that HParams does not list, because they do not change the training."""


def log_options(logger: Logger, config: RunConfig, run: Run, summary: Summary, monitored: str) -> None:
    """Logs the run's options, and for TensorBoard's HParams also the columns.

    Args:
        monitored: the metric, as ``val/...``, that selects the best checkpoint.
    """
    options = dict(_flat(checkpointed.container(config)))
    if not isinstance(logger, TensorBoardLogger):
        logger.log_hyperparams(options)
        return
    # Lightning's log_hyperparams would add a point to the curve of every metric.
    known = {name: _plain(value) for name, value in (run.choices | options).items()}
    _, began, ended = hparams(known, {})
    writer = logger.experiment._get_file_writer()
    for event in (experiment(known, run, results(summary, monitored)), began, ended):
        writer.add_summary(event)


def experiment(options: dict[str, float | str], run: Run, metrics: dict[str, str]) -> Event:
    """The columns of HParams. The options that a sweep varies (single run: the overridden ones) are marked as differing.

    TensorBoard shows marked options first, five options and five metrics by default, and takes the columns of all runs from the
    first run that it finds. ``torch.utils.tensorboard.summary.hparams`` can neither mark options nor leave any out.

    Args:
        options: values of the possible columns, by name.
        metrics: tags of scalars and their display names, in order.
    """
    overridden = [override.lstrip("+~").partition("=")[0] for override in run.overrides]
    overridden = [name for name in overridden if name.split(".")[0] not in MUTE]
    marked = run.varied or overridden
    infos = [
        api_pb2.HParamInfo(
            name=name,
            type=api_pb2.DATA_TYPE_STRING if isinstance(options[name], str) else api_pb2.DATA_TYPE_FLOAT64,
            differs=name in marked,
        )
        for name in dict.fromkeys((*overridden, *ALWAYS))
        if name in options
    ]
    columns = [api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag), display_name=name) for tag, name in metrics.items()]
    content = plugin_data_pb2.HParamsPluginData(
        experiment=api_pb2.Experiment(hparam_infos=infos, metric_infos=columns), version=metadata.PLUGIN_DATA_VERSION
    )
    about = SummaryMetadata.PluginData(plugin_name=metadata.PLUGIN_NAME, content=content.SerializeToString())
    value = Event.Value(tag=metadata.EXPERIMENT_TAG, metadata=SummaryMetadata(plugin_data=about))
    return Event(value=[value])


def results(summary: Summary, monitored: str) -> dict[str, str]:
    """Tags and display names of the result scalars: the monitored metric, memory, throughput, then the other metrics."""
    found = {tag: tag for tag in (monitored, monitored.replace("val/", "test/")) if tag in summary.metrics}
    if summary.peak_memory_bytes is not None:
        found["memory/peak_bytes"] = "peak memory (bytes)"
    if summary.tokens_per_second is not None:
        found["throughput/tokens_per_second"] = "tokens/s"
    elif summary.samples_per_second is not None:
        found["throughput/samples_per_second"] = "samples/s"
    return found | {tag: tag for tag in summary.metrics if not tag.startswith("train/")}


def _plain(value: Any) -> float | str:
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, int | float | str) else str(value)


def _flat(node: dict, prefix: str = ""):
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
