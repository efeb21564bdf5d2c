"""One self-contained HTML page that compares runs, without other files or network access."""

from datetime import datetime
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jinja2 import Environment, PackageLoader

from holotrain.dashboard.charts import CHARTS, Chart
from holotrain.dashboard.curves import smoothed, thinned
from holotrain.dashboard.logs import Curve, Medium
from holotrain.dashboard.table import Reported, columns, different_options, labels, shown
from holotrain.errors import UserError
from holotrain.numeric import counted

POINTS = 1000
"""Maximum number of points per curve, about the width of a chart in pixels."""

SMOOTHED_FROM = 60
"""Curves with at least this many points are smoothed."""

COLOURS = ("#3b7dd8", "#e07b22", "#2e9e5b", "#d1495b", "#8a63d2", "#0fa3b1", "#b5852a", "#d45fa6", "#7a8794", "#8fa81f")


def page(runs: list[Reported]) -> str:
    """The HTML text of the page.

    Args:
        runs: at least one, in the order of the table.

    Raises:
        UserError: the package of the extra ``report`` is not installed.
    """
    names = labels(runs)
    colours = [_colour(number) for number in range(len(runs))]
    environment = Environment(loader=PackageLoader("holotrain.dashboard", ""), autoescape=True)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment.get_template("page.html").render(
        title=names[0] if len(runs) == 1 else counted(len(runs), "run"),
        date=datetime.now().strftime("%Y-%m-%d %H:%M"),
        labelled=list(zip(names, colours, strict=True)),
        columns=columns(runs),
        options=different_options(runs),
        shown=shown,
        media=[(kind, _media(runs, kind)) for kind in ("images", "texts")],
        library={name: _of_uplot(name) for name in ("uPlot.min.css", "uPlot.iife.js")},
        data={
            "runs": [{"label": name, "colour": colour} for name, colour in zip(names, colours, strict=True)],
            "charts": [drawn for chart in CHARTS if (drawn := _chart(chart, runs))],
        },
    )


def _chart(chart: Chart, runs: list[Reported]) -> dict[str, Any] | None:
    """The data of a chart for page.js; None if no run has any."""
    lines = [
        {"run": number, "line": list(chart.lines).index(tag)} | points
        for number, run in enumerate(runs)
        for tag in chart.lines
        if tag in run.curves and (points := _line(run, run.curves[tag].finite()))
    ]
    if not lines:
        return None
    kind = {"title": chart.title, "unit": chart.unit, "log": chart.logarithmic}
    return kind | {"names": list(chart.lines.values()), "lines": lines}


def _line(run: Reported, curve: Curve) -> dict[str, Any] | None:
    if not len(curve.steps):
        return None
    line: dict[str, Any] = _points(run, curve, thinned(curve.values, POINTS))
    if len(curve.steps) >= SMOOTHED_FROM:
        window = max(len(curve.steps) // 40, 5)
        smooth = Curve(curve.steps, smoothed(curve.values, window), curve.instants)
        line["smooth"] = _points(run, smooth, thinned(smooth.values, POINTS // 4))
    return line


def _points(run: Reported, curve: Curve, kept: np.ndarray) -> dict[str, list | None]:
    """Steps, seconds since the first log of the run, and values with five digits."""
    seconds = None
    if curve.instants is not None:
        start = min(other.instants[0] for other in run.curves.values() if other.instants is not None)
        seconds = [round(float(instant - start), 2) for instant in curve.instants[kept]]
    return {"x": curve.steps[kept].tolist(), "t": seconds, "y": [float(f"{value:.5g}") for value in curve.values[kept]]}


def _media(runs: list[Reported], kind: Literal["images", "texts"]) -> list[tuple[int, str, Medium]]:
    """The images or texts of all runs, each with the number of its run and its tag; those of a tag next to each other."""
    found = [(number, tag, medium) for number, run in enumerate(runs) for tag, medium in getattr(run, kind).items()]
    return sorted(found, key=lambda each: each[1])


def _colour(number: int) -> str:
    """Distinct on light and dark backgrounds; after the tenth, hues at the golden angle."""
    return COLOURS[number] if number < len(COLOURS) else f"hsl({number * 137.5 % 360:.0f} 55% 52%)"


def _of_uplot(name: str) -> str:
    """A file of uPlot, from the package uplot-python, which is not imported."""
    try:
        return Path(str(distribution("uplot-python").locate_file(f"uplot/static/{name}"))).read_text(encoding="utf-8")
    except PackageNotFoundError:
        raise UserError("report: uplot-python is not installed; pip install 'holotrain[report]'") from None
