"""Plots a sweep of error diffusion: test accuracy by depth for every rule and width; mean and range over seeds.

    python -m holotrain fit -m task=error_diffusion model.rule=kaneko,article,backpropagation model.depth=1,5,17 \
        model.width=16,32 seed=0,1,2
    python scripts/plot_error_diffusion.py runs/fit/sweeps/... --json scripts/results/error_diffusion_digits_cpu.json \
        --picture scripts/results/error_diffusion_digits_cpu.png

Reads the configurations and the summaries of the jobs.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path

import yaml
from bench_common import arguments, begin, draw_to, plotter, save

from holotrain.error_diffusion.rules import BACKPROPAGATION, RULES

SHOWN = (*RULES, BACKPROPAGATION)


def read(sweep: Path) -> list[dict]:
    """One row for each rule, width and depth."""
    accuracies = defaultdict(list)
    for path in sorted(sweep.glob("[0-9]*/summary.json"), key=lambda path: int(path.parent.name)):
        model = yaml.safe_load(path.with_name("config.yaml").read_text())["model"]
        metrics = json.loads(path.read_text())["metrics"]
        if "test/accuracy" in metrics:  # a job that was interrupted has none
            accuracies[model["rule"], model["width"], model["depth"]].append(metrics["test/accuracy"])
    return [
        {"rule": rule, "width": width, "depth": depth, "accuracy": found, "mean": statistics.mean(found)}
        for (rule, width, depth), found in sorted(accuracies.items(), key=lambda entry: (SHOWN.index(entry[0][0]), entry[0]))
    ]


def draw(rows: list[dict], path: Path) -> None:
    pyplot = plotter()

    widths = sorted({row["width"] for row in rows})
    figure, panels = pyplot.subplots(1, len(widths), figsize=(4.6 * len(widths), 3.8), sharey=True, squeeze=False)
    for axes, width in zip(panels[0], widths, strict=True):
        for rule, marker in zip(SHOWN, "osx", strict=True):
            mine = [row for row in rows if (row["rule"], row["width"]) == (rule, width)]
            below = [row["mean"] - min(row["accuracy"]) for row in mine]
            above = [max(row["accuracy"]) - row["mean"] for row in mine]
            depths = [row["depth"] for row in mine]
            axes.errorbar(depths, [row["mean"] for row in mine], [below, above], marker=marker, capsize=3, label=rule)
        axes.set_xscale("log")
        every = sorted({row["depth"] for row in rows})
        axes.set_xticks(every, [str(depth) for depth in every])
        axes.minorticks_off()
        axes.set(title=f"{width} pairs per layer", xlabel="hidden layers")
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("test accuracy")
    panels[0][0].legend(fontsize=8)
    draw_to(path, figure, dpi=100)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("folder", type=Path, help="that of the sweep")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    if not (options.folder / "sweep.csv").is_file():
        parser.error(f"{options.folder} is not the folder of a finished sweep: it has no sweep.csv")
    rows = read(options.folder)
    result = begin(options)
    print(f"{'rule':<16}{'width':>6}{'depth':>6}{'mean':>9}   by seed")
    for row in rows:
        seeds = " ".join(f"{accuracy:.4f}" for accuracy in row["accuracy"])
        print(f"{row['rule']:<16}{row['width']:>6}{row['depth']:>6}{row['mean']:>9.4f}   {seeds}")
    first = json.loads((options.folder / "0" / "summary.json").read_text())
    save(result | {"device": first["device"], "rows": rows}, options.json)
    if options.picture:
        draw(rows, options.picture)


if __name__ == "__main__":
    main()
