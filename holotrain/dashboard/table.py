"""The comparison table: differing options and results of the runs."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isnan
from pathlib import Path
from typing import Any

from holotrain.dashboard.logs import Curve, Medium

NAMING = ("name", "tags")

UNCOMPARED = ("output_dir", "resume", "hydra", "logger", *NAMING)
"""Options that do not change the training."""

CLASS = "._target_"
"""How the name of an option ends that is the class of a group."""

OF_PYTHON = "python_object"
"""The last part of the class that stands for an object of the user's own."""

LOWER_IS_BETTER = ("loss", "perplexity", "bits_per_byte")
"""Metrics that are the better the lower, whether or not a run follows them."""


@dataclass
class Reported:
    """A run in the report.

    Args:
        folder: folder of the run.
        config: all options, nested; empty without a config.yaml.
        summary: content of summary.json; empty without one (the run is not finished, or was killed).
        curves: its scalars by tag.
        images, texts: the last of each tag.
        words: the overrides of its command line, of a run without a summary.
        failure: why it failed, if it is a job of a sweep that did.
    """

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    images: dict[str, Medium] = field(default_factory=dict)
    texts: dict[str, Medium] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    failure: str | None = None

    @property
    def overrides(self) -> dict[str, str]:
        """The overrides of its command line; a class, such as that of ``model._target_``, stands for its group."""
        words = (word.lstrip("+~").partition("=") for word in self.summary.get("overrides", self.words))
        found = {}
        for key, _, value in words:
            if key.split(".")[0] not in UNCOMPARED:
                found[key.removesuffix(CLASS)] = value.rpartition(".")[2] if key.endswith(CLASS) else value
        return found

    @property
    def status(self) -> str:
        if self.summary:
            return self.summary["status"]
        return f"failed: {self.failure}" if self.failure else "unfinished"

    @property
    def name(self) -> str:
        return shown(self.config.get("name"))

    @property
    def tags(self) -> str:
        tags = self.config.get("tags")
        return ", ".join(map(shown, tags)) if isinstance(tags, list) else ""

    @property
    def metrics(self) -> dict[str, float | None]:
        """The final metrics; without a summary, the last logged ones."""
        if self.summary:
            return self.summary["metrics"]
        measured = ("train/loss", "val/", "test/")
        return {tag: float(curve.values[-1]) for tag, curve in self.curves.items() if tag.startswith(measured)}


def changed(runs: list[Reported]) -> dict[str, list[Any]]:
    """The overridden options and groups in which runs differ, with the value of each run."""
    keys = dict.fromkeys(key for run in runs for key in run.overrides)
    return _different({key: [_value(run, key) for run in runs] for key in keys})


def different_options(runs: list[Reported]) -> dict[str, list[Any]]:
    """All options in which runs differ, with the value of each run."""
    configs = [dict(flat(run.config)) for run in runs]
    keys = dict.fromkeys(key for options in configs for key in options if key.split(".")[0] not in UNCOMPARED)
    return _different({key: [options.get(key) for options in configs] for key in keys})


def labels(runs: list[Reported]) -> list[str]:
    """A unique name for each run: its own, if no other has it; else its differing overrides, if they are short; else its
    folder."""
    options = changed(runs)
    lasts = [key.rpartition(".")[2] for key in options]
    short = {key: last if lasts.count(last) == 1 else key for key, last in zip(options, lasts, strict=True)}
    folders = [_folder_name(run.folder) for run in runs]
    if len(set(folders)) < len(folders):
        folders = [str(run.folder) for run in runs]
    found = [", ".join(f"{short[key]}={shown(values[n])}" for key, values in options.items()) for n in range(len(runs))]
    names = [run.name for run in runs]
    found = [name if name and names.count(name) == 1 else label for name, label in zip(names, found, strict=True)]
    named = []
    for label, folder in zip(found, folders, strict=True):
        if not label or len(label) > 60:
            named.append(folder)
        else:
            named.append(label if found.count(label) == 1 else f"{label} ({folder})")
    return named


def shown(value: Any) -> str:
    """A value as text."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass
class Column:
    """
    Args:
        name: heading.
        cells: one text per run.
        figures: the numbers of the cells; None for a run without one.
        best: the figure to mark.
    """

    name: str
    cells: list[str]
    figures: list[float | None] = field(default_factory=list)
    best: float | None = None


def columns(runs: list[Reported]) -> list[Column]:
    """Differing options, then metrics, memory, throughput, time, status and folder."""
    options = changed(runs)
    found = [Column(key, [getattr(run, key) for run in runs]) for key in NAMING if any(getattr(run, key) for run in runs)]
    found += [Column(key, [shown(value) for value in values]) for key, values in options.items()]
    for name in ("device", "parameters"):
        values = [run.summary.get(name) for run in runs]
        if name not in options and len(set(values)) > 1:
            found.append(Column(name, [f"{value:,}" if isinstance(value, int) else shown(value) for value in values]))
    for name in _metric_names(runs):
        found.append(_figures(name, [run.metrics.get(name) for run in runs], _better(name, runs)))
    for name, heading, better, factor in (
        ("peak_memory_bytes", "peak memory, MiB", min, 2**-20),
        ("samples_per_second", "samples/s", max, 1),
        ("tokens_per_second", "tokens/s", max, 1),
        ("step_seconds", "ms per step", min, 1e3),
        ("steps", "steps", None, 1),
        ("seconds", "time, s", None, 1),
    ):
        values = [None if (value := run.summary.get(name)) is None else value * factor for run in runs]
        found.append(_figures(heading, values, better))
    found = [column for column in found if any(column.cells)]
    found.append(Column("status", [run.status for run in runs]))
    found.append(Column("folder", [str(run.folder) for run in runs]))
    return found


def _better(name: str, runs: list[Reported]) -> Callable[[Iterable[float]], float] | None:
    """max or min, whichever marks the best run; None: not known, or, as the loss of the last training batch, no result."""
    kind, _, metric = name.removeprefix("best/").partition("/")
    modes = {run.summary["mode"] for run in runs if run.summary.get("monitor") == f"val/{metric}"}
    if kind == "train":
        return None
    if "accuracy" in name or modes == {"max"}:
        return max
    return min if modes == {"min"} or metric in LOWER_IS_BETTER else None


def _figures(name: str, values: list[float | None], better: Callable[[Iterable[float]], float] | None) -> Column:
    def text(value: float | None) -> str:
        if value is None:
            return ""
        return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"

    known = {value for value in values if value is not None and not isnan(value)}
    best = better(known) if better is not None and len(known) > 1 else None
    return Column(name, [text(value) for value in values], values, best)


def _metric_names(runs: list[Reported]) -> list[str]:
    """Losses after the other metrics, training after validation and test."""
    names = dict.fromkeys(name for run in runs for name in run.metrics if name != "train/lr")
    return sorted(names, key=lambda name: (name.startswith("train/"), name.endswith("/loss")))


def _value(run: Reported, key: str) -> Any:
    """An option's value; for a group, the option or the class that was chosen, or else its kind."""
    node: Any = run.config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    if node is not None and not isinstance(node, Mapping):
        return node
    kind = (node or {}).get("kind")
    named = run.overrides.get(key)
    return (run.summary.get("choices") or {}).get(key) or (kind if named == OF_PYTHON else named) or kind


def _different(values: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {key: row for key, row in values.items() if any(value != row[0] for value in row)}


def flat(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested options with their full names."""
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _folder_name(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name}" if folder.name.isdigit() else folder.name
