"""What cuda_session.py ends with: its results against the goals, all other figures, and how each piece ended."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_common import NOTHING_FITS, plotter

EQUAL, LARGEST = "equal_batch_", "largest_batch_"
OVERLAPPED = "pareprop"
MIXED = "auto, 60% of autograd"
OURS = ("reversible", OVERLAPPED, "auto")
Results = Mapping[str, dict[str, Any]]


@dataclass(frozen=True)
class Goal:
    """A figure to reach: at least ``limit``, or at most."""

    what: str
    where: str
    figure: float
    limit: float
    at_least: bool = True
    remark: str = ""

    @property
    def reached(self) -> bool:
        return self.figure >= self.limit if self.at_least else self.figure <= self.limit


def goals(results: Results) -> Iterator[Goal]:
    for name, found in results.items():
        if name.startswith(EQUAL):
            model, rows = name.removeprefix(EQUAL), found["engines"]
            if OVERLAPPED in rows:
                yield Goal("overlapped / plain, equal batch", model, rows[OVERLAPPED]["throughput_over_autograd"], 0.85)
            if MIXED in rows:
                share = rows[MIXED]["peak"] / rows["autograd"]["peak"]
                over = rows[MIXED]["throughput_over_autograd"]
                yield Goal("mixed storing / plain, 60 % of its memory", model, over, 0.92, remark=f"at {share:.0%}")
            for engine in (OVERLAPPED, MIXED):
                if "reserved" in rows.get(engine, {}):
                    ratio = rows[engine]["reserved"] / rows[engine]["peak"]
                    yield Goal("reserved / allocated", f"{model}, {engine}", ratio, 1.15, at_least=False)
        if name.startswith(LARGEST):
            model = name.split("_gib_")[1]
            for budget, part in found["budgets"].items():
                rows, why = part["engines"], part["left_out"].get("autograd")
                if best := max((row for row in OURS if row in rows), key=lambda row: speed(rows, row), default=None):
                    if why is None:
                        over, remark = speed(rows, best) / speed(rows, "autograd"), best
                    else:  # infinitely faster than what does not fit, and unknown beside what failed otherwise
                        over, remark = math.inf if NOTHING_FITS in why else math.nan, f"{best}; plain: {why}"
                    yield Goal("largest batch: ours / plain", f"{model}, {budget}", over, 1.5, remark=remark)
    for row in results.get("synthesis", {}).get("vectors", []):
        if row["length"] == 2**17:
            forms = {form: taken for form, taken in row["milliseconds"].items() if form != "as published"}
            best = min(forms, key=forms.get)
            yield Goal("synthesis of 2^17 elements, ms", "vector", forms[best], 0.03, at_least=False, remark=best)


def speed(rows: dict[str, dict], engine: str) -> float:
    return rows[engine]["samples_per_second"]


def figures(results: Results) -> Iterator[tuple[str, str]]:
    """What has no goal: (what, figure)."""
    for name, found in results.items():
        if name.startswith("tests_"):
            counts = ", ".join(f"{count} {outcome}" for outcome, count in found["counts"].items())
            yield name.replace("_", " "), counts + "".join(f"; {test} left out" for test in found["left_out"])
    if found := results.get("gradients_in_float64"):
        errors = {engine: row["gradient_error"] for engine, row in found["points"][0]["engines"].items()}
        yield (
            "largest relative error of gradients in fp64",
            "{1:.1e} ({0})".format(*max(errors.items(), key=lambda row: row[1])),
        )
    if found := results.get("overlap_trace"):
        for engine, row in found["points"][0]["engines"].items():
            together = row["together"]
            busy = ", ".join(f"{taken:.2f}" for taken in together["busy_ms"][:3])
            yield f"streams of {engine}", f"busy {busy} ms, at the same time {together['together_ms']:.2f} ms"
    if found := results.get("cuda_graphs"):
        rows = found["points"][0]["engines"]
        for engine in rows:
            if f"{engine}, graphed" in rows:
                ratio = rows[f"{engine}, graphed"]["samples_per_second"] / rows[engine]["samples_per_second"]
                yield f"CUDA graph of {engine}", f"{ratio:.2f} times as fast"
    if found := results.get("planned_peaks"):
        worst = max(found["plans"], key=lambda row: abs(row["error"]))
        yield "largest error of a planned peak", f"{worst['error']:+.2%} ({worst['model']}, {worst['backward']})"
    if found := results.get("synthesis"):
        for size, rows in found["models"].items():
            ratio = rows["associative"]["milliseconds"] / rows["AdamW fused"]["milliseconds"]
            yield f"synthesis of ViT-{size} / fused AdamW", f"{ratio:.2f}"
    if found := results.get("error_diffusion"):
        for row in found["rows"]:
            taken = row["milliseconds"]["update"]
            yield (
                f"error diffusion, {row['depth']} layers",
                f"{taken:.2f} ms, autograd / update {row['autograd_over_update']:.2f}",
            )
    if found := results.get("signal_kernel"):
        for size, row in found["cuda"]["cubes"].items():
            yield f"signalling product / cuBLAS, {size} cubed", f"{row['over_cublas']:.3f}"
    for name in ("gradients_in_float64", "overlap_trace", "cuda_graphs"):
        for engine, reason in results[name]["points"][0]["left_out"].items() if name in results else ():
            yield f"{name.replace('_', ' ')}, {engine}", f"left out: {reason}"
    for name in ("generation", "generation_int8"):
        for form, rate in results.get(name, {}).get("tokens_per_second", {}).items():
            yield f"{name.replace('_', ' ')}, {form}", f"{rate:.0f} tokens/s"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def engine_table(rows: dict[str, dict], left_out: dict[str, str]) -> str:
    """Each engine's speed against plain's, and its memory."""

    def mebibytes(row: dict, *keys: str) -> str:
        return next((f"{row[key] / 2**20:.0f}" for key in keys if key in row), "-")

    cells = []
    for name, row in rows.items():
        over = f"{speed(rows, name) / speed(rows, 'autograd'):.2f}" if "autograd" in rows else "-"
        memory = [mebibytes(row, "peak", "allocated"), mebibytes(row, "reserved")]
        cells.append([name, str(row.get("batch", "")), f"{row['samples_per_second']:.1f}", over, *memory])
    cells += [[name, "", "-", "-", "-", reason] for name, reason in left_out.items()]
    return table(["engine", "batch", "samples/s", "/ plain", "allocated MiB", "reserved MiB"], cells)


def markdown(states: Mapping[str, tuple[str, float | None]], results: Results, machine: dict[str, Any], dry: bool) -> str:
    """The report. ``states``: of every piece, how it ended and its seconds."""
    where = machine["gpu"] or machine["cpu"]
    text = "# Dry run on a CPU: these figures mean nothing\n\n" if dry else "# Measured on a GPU\n\n"
    text += f"{where}, torch {machine['torch']}, Python {machine['python']}.\n\n## Goals\n\n"
    rows = []
    for goal in goals(results):
        limit = f"{'at least' if goal.at_least else 'at most'} {goal.limit:g}"
        verdict = "dry run" if dry else "yes" if goal.reached else "**no**"
        rows.append([goal.what, goal.where, f"{goal.figure:.3g}", limit, verdict, goal.remark])
    text += table(["goal", "where", "figure", "goal is", "reached", ""], rows)
    text += "\n## Other figures\n\n" + table(["what", "figure"], [list(row) for row in figures(results)])
    for name, found in results.items():
        if name.startswith(EQUAL):
            text += f"\n## {name.removeprefix(EQUAL)}, batches of {found['options']['batch']}\n\n"
            text += engine_table(found["engines"], found["left_out"])
        if name.startswith(LARGEST):
            for budget, part in found["budgets"].items():
                text += f"\n## {name.split('_gib_')[1]}, the largest batch in {budget}\n\n"
                text += engine_table(part["engines"], part["left_out"])
    ended = [[name, state, "" if seconds is None else f"{seconds:.0f}"] for name, (state, seconds) in states.items()]
    return text + "\n## Pieces\n\n" + table(["piece", "", "seconds"], ended)


def draw(results: Results, path: Path) -> str:
    """Draws speed against memory at equal batch, and speed at the largest batch, over plain's; returns what became of it."""
    try:
        pyplot = plotter()
    except ModuleNotFoundError:
        return f"matplotlib is not installed: no {path.name}"
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5.5))
    equal = {name.removeprefix(EQUAL): found["engines"] for name, found in results.items() if name.startswith(EQUAL)}
    engines = list(dict.fromkeys(engine for rows in equal.values() for engine in rows))
    for number, engine in enumerate(engines):
        places = [
            (rows[engine]["peak"] / rows["autograd"]["peak"], rows[engine]["throughput_over_autograd"])
            for rows in equal.values()
            if engine in rows
        ]
        left.plot(*zip(*places, strict=True), "os^vDP*Xph<>"[number % 12], label=engine)
    left.axhline(0.85, color="grey", linestyle="--", linewidth=1)
    left.set(xlabel="peak memory / plain's", ylabel="throughput / plain's", title="at equal batch, a point for each model")
    left.legend(fontsize=8)
    found = [goal for goal in goals(results) if goal.what.startswith("largest batch") and math.isfinite(goal.figure)]
    right.barh([goal.where for goal in found], [goal.figure for goal in found], color="#1668b8")
    right.axvline(1.5, color="grey", linestyle="--", linewidth=1)
    right.set(xlabel="throughput / plain's", title="at the largest batch within a budget of memory")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    return f"drawn to {path}"
