"""Which scalars each chart shows, in TensorBoard's Custom Scalars and on the report page."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chart:
    """
    Args:
        group: the group in TensorBoard.
        title: title of the chart.
        lines: the tags of its lines, with their names.
        unit: unit of the values: ``"bytes"``, ``"seconds"``, ``"milliseconds"``, ``"fraction"`` (shown in percent), or the text
            after the title.
        logarithmic: whether the page first shows it on a logarithmic scale.
    """

    group: str
    title: str
    lines: dict[str, str]
    unit: str = ""
    logarithmic: bool = False


CHARTS = (
    Chart("Loss", "Loss", {"train/loss": "train", "val/loss": "validation"}, "nats"),
    Chart("Accuracy", "Accuracy", {"val/accuracy": "validation", "val/accuracy_top5": "validation, top 5"}, "fraction"),
    Chart("Perplexity", "Bits per byte", {"val/bits_per_byte": "validation"}),
    Chart("Perplexity", "Perplexity", {"val/perplexity": "validation"}, logarithmic=True),
    Chart(
        "Memory",
        "Memory",
        {"memory/peak_bytes": "peak", "memory/current_bytes": "current", "memory/reserved_bytes": "reserved"},
        "bytes",
    ),
    Chart(
        "Memory",
        "Peak memory by phase",
        {
            "memory/forward_backward_peak_bytes": "forward and backward",
            "memory/optimizer_peak_bytes": "optimizer",
            "memory/validation_peak_bytes": "validation",
        },
        "bytes",
    ),
    Chart("Throughput", "Throughput", {"throughput/samples_per_second": "samples"}, "samples/s"),
    Chart("Throughput", "Throughput in tokens", {"throughput/tokens_per_second": "tokens"}, "tokens/s"),
    Chart("Throughput", "Step time", {"throughput/step_seconds": "step"}, "seconds"),
    Chart("Throughput", "FLOPs utilization", {"throughput/mfu": "model", "throughput/hfu": "hardware"}, "fraction"),
    Chart("Throughput", "Padding", {"padding/fraction": "batches", "padding/unbucketed": "random batches"}, "fraction"),
    Chart("Drift", "Error of recomputed activations", {"reversible/drift": "drift"}, "relative", logarithmic=True),
    Chart("Synthesis", "Cosine between update and gradient", {"synthesis/gradient_cosine": "cosine"}),
    Chart("Synthesis", "Synthesis time", {"synthesis/milliseconds": "per step"}, "milliseconds"),
    Chart("Synthesis", "Update norm", {"synthesis/update_norm": "norm"}, logarithmic=True),
    Chart("Synthesis", "Skipped steps", {"synthesis/skipped": "skipped"}),
    Chart("Error diffusion", "Cosine between update and gradient descent", {"error_diffusion/alignment": "alignment"}),
    Chart(
        "Error diffusion",
        "Dead cells and wrong signs",
        {"error_diffusion/dead_cells": "dead cells", "error_diffusion/sign_violations": "wrong signs"},
        "fraction",
    ),
    Chart("Optimization", "Gradient norm before clipping", {"optimization/gradient_norm": "norm"}, logarithmic=True),
    Chart("Optimization", "Size of updates relative to weights", {"optimization/update_ratio": "ratio"}, logarithmic=True),
    Chart("Learning rate", "Learning rate", {"train/lr": "learning rate"}),
)
"""All charts, in order."""


def tensorboard_layout(prefixes: set[str], tags: set[str]) -> dict[str, dict[str, list]]:
    """The charts with a tag of such a prefix, or among ``tags``, in the form of ``SummaryWriter.add_custom_scalars``.

    A chart always lists all its lines: TensorBoard merges the layouts of runs by chart, and shows a chart twice if the lines
    of two runs differ.
    """
    layout: dict[str, dict[str, list]] = {}
    for chart in CHARTS:
        if any(tag in tags or tag.partition("/")[0] in prefixes for tag in chart.lines):
            # TensorBoard matches tags by regular expressions from the start; $ ends the match.
            layout.setdefault(chart.group, {})[chart.title] = ["Multiline", [f"{tag}$" for tag in chart.lines]]
    return layout
