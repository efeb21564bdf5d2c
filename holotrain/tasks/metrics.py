"""Metrics of torchmetrics that a configuration names, for classifications."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torchmetrics.classification
from torchmetrics import Metric

MULTICLASS = "Multiclass"
"""With what the names of the classes begin."""

TAKEN = ("loss", "accuracy", "accuracy_top5")
"""What every classification logs under these names."""


def named_metrics(named: Mapping[str, Any], classes: int) -> dict[str, Any]:
    """The metrics of a classification by their names.

    Args:
        named: for each name a metric of torchmetrics, such as ``F1Score``, or a mapping of ``metric`` and its other arguments.

    Raises:
        ValueError: a name cannot be logged, torchmetrics has no such metric, refuses an argument, or gives several numbers.
    """
    return {name: _checked(name, chosen, classes) for name, chosen in named.items()}


def _checked(name: str, chosen: Any, classes: int) -> Metric:
    if not isinstance(name, str) or not name.isidentifier() or name in TAKEN:
        raise ValueError(f"metrics: {name!r} is no name for a metric; use letters, and none of {', '.join(TAKEN)}")
    options = {"metric": chosen} if isinstance(chosen, str) else dict(chosen) if isinstance(chosen, Mapping) else {}
    kind = getattr(torchmetrics.classification, f"{MULTICLASS}{options.pop('metric', None)}", None)
    if kind is None:
        known = [each.removeprefix(MULTICLASS) for each in dir(torchmetrics.classification) if each.startswith(MULTICLASS)]
        raise ValueError(f"metrics: {name}: {chosen!r} names no metric of torchmetrics; use one of {', '.join(known)}")
    try:
        with torch.device("cpu"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a class without a sample
            tried = kind(num_classes=classes, **options)
            tried.update(torch.zeros(2, classes), torch.tensor([0, 1 % classes]))
            result = tried.compute()
        if isinstance(result, torch.Tensor) and result.ndim == 0:
            return kind(num_classes=classes, **options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"metrics: {name}: {error}") from error
    raise ValueError(f"metrics: {name}: {kind.__name__.removeprefix(MULTICLASS)} gives more than one number")


def direction(metric: Metric) -> str:
    """``min`` or ``max``, whichever is better. torchmetrics leaves it open where higher is better, as for Specificity."""
    return "min" if metric.higher_is_better is False else "max"
