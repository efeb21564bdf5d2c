"""The tabs HParams and Custom Scalars of TensorBoard: the options and results to compare, and the charts."""

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData  # ty: ignore[missing-module-member]
from torch.utils.tensorboard.summary import hparams

from holotrain.errors import readable

PHASES = ("forward_backward", "optimizer", "validation")

CHARTS = {
    "Loss": {"Loss": ("train/loss", "val/loss")},
    "Accuracy": {"Accuracy": ("val/accuracy", "val/accuracy_top5")},
    "Perplexity": {"Bits per byte": ("val/bits_per_byte",), "Perplexity": ("val/perplexity",)},
    "Memory": {
        "Memory, MiB": ("memory/peak_MiB", "memory/current_MiB", "memory/reserved_MiB"),
        "Peak of a step, MiB": ("memory/step_peak_MiB",),
        "Peak memory by phase, MiB": tuple(f"memory/{phase}_peak_MiB" for phase in PHASES),
    },
    "Throughput": {
        "Throughput": ("throughput/samples_per_second",),
        "Throughput in tokens": ("throughput/tokens_per_second",),
        "Step time": ("throughput/step_seconds",),
        "FLOPs utilization": ("throughput/mfu", "throughput/hfu"),
    },
    "Drift": {"Error of recomputed activations": ("reversible/drift",)},
    "Synthesis": {
        "Cosine between update and gradient": ("synthesis/gradient_cosine",),
        "Synthesis time": ("synthesis/milliseconds",),
        "Update norm": ("synthesis/update_norm",),
        "Skipped steps": ("synthesis/skipped",),
    },
    "Error diffusion": {
        "Cosine between update and gradient descent": ("error_diffusion/alignment",),
        "Dead cells and wrong signs": ("error_diffusion/dead_cells", "error_diffusion/sign_violations"),
    },
    "Optimization": {
        "Gradient norm before clipping": ("optimization/gradient_norm",),
        "Size of updates relative to weights": ("optimization/update_ratio",),
    },
    "Learning rate": {"Learning rate": ("train/lr",)},
}
"""The tags of each chart, by its group and its title."""

NOT_COMPARED = ("output_dir", "resume", "hydra", "logger", "name", "tags")
"""Options that do not change the training."""


def log_options(
    loggers: Iterable[Logger],
    options: Mapping[str, Any],
    choices: Mapping[str, str],
    first: Iterable[str],
    alone: bool,
    validated: list[str],
    logged: Mapping[str, bool],
) -> None:
    """Logs the options of a run and, for TensorBoard, the charts and the names of the results, before it trains, so that one
    that was killed is compared too.

    Args:
        options: the nested options.
        choices: the option of each group.
        first: the options and groups whose columns come first.
        alone: whether TensorBoard shows no columns of others, as in a sweep, which has given all jobs the same.
        validated: the metrics of validation, the one that selects the best checkpoint first.
        logged: whether tags that begin with such a word are logged, beside those that every training logs.
    """
    flat = dict(_flat(options))
    for logger in loggers:
        if not isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(flat)
            continue
        logger.experiment.add_custom_scalars(_layout(validated, logged))
        # Lightning's log_hyperparams(options, results) would add a point to the curve of every metric.
        results = dict.fromkeys(_results(options["test"], validated), 0.0)
        columns, marked = _columns(flat | dict(choices)), {*first, "name", "tags"}
        _, session, _ = hparams(columns, {})
        experiment, _, _ = hparams({name: columns[name] for name in columns if name in marked or not alone}, results)
        _show_first(experiment, marked)
        for event in (experiment, session):
            logger.experiment._get_file_writer().add_summary(event)
        logger.experiment.flush()  # else a run that is killed in its first minutes would have none


def _flat(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested options with their full names."""
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _layout(validated: list[str], logged: Mapping[str, bool]) -> dict[str, dict[str, list]]:
    """The charts of what a training logs, in the form of ``SummaryWriter.add_custom_scalars``.

    A chart always lists all its lines: TensorBoard merges the layouts of runs by chart, and shows a chart twice if the lines
    of two runs differ.
    """
    logged = dict.fromkeys(("train", "memory", "throughput", "optimization"), True) | dict(logged)
    layout: dict[str, dict[str, list]] = {}
    for group, charts in CHARTS.items():
        for title, lines in charts.items():
            if any(tag in validated or logged.get(tag.partition("/")[0]) for tag in lines):
                # TensorBoard matches tags by regular expressions from the start; $ ends the match.
                layout.setdefault(group, {})[title] = ["Multiline", [f"{tag}$" for tag in lines]]
    return layout


def _results(tested: bool, validated: list[str]) -> list[str]:
    """The results, in the order of their importance."""
    results = [*validated[:2], "memory/step_peak_MiB", "memory/peak_MiB", "seconds", *validated[2:]]
    results += [f"best/{name}" for name in validated[:1]]
    if tested:
        results += [name.replace("val/", "test/") for name in validated]
    return [*results, "throughput/samples_per_second"]


def _columns(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options to compare: what changes the training, and the name and tags of the run."""
    named = {"name": options["name"], "tags": ", ".join(options["tags"])}
    columns: dict[str, Any] = {name: readable(text) for name, text in named.items() if text}
    for name, value in options.items():
        if name.split(".")[0] not in NOT_COMPARED:
            columns[name] = value if type(value) in (int, float) else readable(str(value))
    return columns


def _show_first(experiment: Any, names: set[str]) -> None:
    """Marks some options of a summary of HParams. TensorBoard sorts its columns by this mark, then by name."""
    plugin_data = experiment.value[0].metadata.plugin_data
    content = HParamsPluginData.FromString(plugin_data.content)
    for option in content.experiment.hparam_infos:
        option.differs = option.name in names
    plugin_data.content = content.SerializeToString()


def finish(loggers: Iterable[Logger], completed: bool) -> None:
    """Closes the loggers, which show whether the run was completed."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger) and completed:
            logger.experiment._get_file_writer().add_summary(hparams({}, {})[2])
        logger.finalize("success" if completed else "failed")
        if isinstance(logger, WandbLogger):
            logger.experiment.finish(exit_code=int(not completed))  # else the next job of a sweep continues this run


@contextmanager
def finished_if_it_fails(loggers: Iterable[Logger]) -> Generator[None]:
    """Closes the loggers of a run that an error ends inside."""
    try:
        yield
    except BaseException:
        finish(loggers, completed=False)
        raise
