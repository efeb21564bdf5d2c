"""Which scalars stand together in a chart: TensorBoard's layout and the page of a report show the same ones."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chart:
    """
    Args:
        group: under which TensorBoard shows it.
        title: of the chart.
        lines: the tags in it, each with its name in the chart.
        unit: of its values: ``"bytes"``, ``"seconds"``, ``"milliseconds"``, ``"fraction"`` (shown in percent), or what to
            write beside the title.
        logarithmic: whether it is shown on a logarithmic scale at first, where there is a choice.
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
    Chart("Throughput", "Time of a step", {"throughput/step_seconds": "step"}, "seconds"),
    Chart("Throughput", "FLOPs utilisation", {"throughput/mfu": "model", "throughput/hfu": "hardware"}, "fraction"),
    Chart("Throughput", "Padding", {"padding/fraction": "batches", "padding/unbucketed": "random batches"}, "fraction"),
    Chart("Drift", "Drift of rebuilt activations", {"reversible/drift": "drift"}, "relative", logarithmic=True),
    Chart("Synthesis", "Cosine of update to gradient", {"synthesis/gradient_cosine": "cosine"}),
    Chart("Synthesis", "Time of synthesis", {"synthesis/milliseconds": "a step"}, "milliseconds"),
    Chart("Synthesis", "Norm of the update", {"synthesis/update_norm": "norm"}, logarithmic=True),
    Chart("Synthesis", "Skipped steps", {"synthesis/skipped": "skipped"}),
    Chart("Error diffusion", "Cosine of update to gradient descent", {"error_diffusion/alignment": "alignment"}),
    Chart(
        "Error diffusion",
        "Dead cells and lost signs",
        {"error_diffusion/dead_cells": "dead cells", "error_diffusion/sign_violations": "lost signs"},
        "fraction",
    ),
    Chart("Learning rate", "Learning rate", {"train/lr": "rate"}),
)
"""Every chart there is, in order."""


def tensorboard_layout(tags: set[str]) -> dict[str, dict[str, list]]:
    """The charts of which a run can have a tag, as ``SummaryWriter.add_custom_scalars`` takes them.

    A chart comes with all its lines: TensorBoard puts the layouts of runs together chart by chart, and would show one twice
    of which two runs have different lines.
    """
    layout: dict[str, dict[str, list]] = {}
    for chart in CHARTS:
        if tags & chart.lines.keys():
            # TensorBoard matches the beginnings of tags.
            layout.setdefault(chart.group, {})[chart.title] = ["Multiline", [f"{tag}$" for tag in chart.lines]]
    return layout
