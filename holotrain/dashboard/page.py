"""One self-contained HTML page that compares runs, without other files or network access."""

import html
import json
from datetime import datetime
from importlib import resources
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Literal

import numpy as np

from holotrain.dashboard.charts import CHARTS, Chart
from holotrain.dashboard.curves import smoothed, thinned
from holotrain.dashboard.logs import Curve, Medium
from holotrain.dashboard.table import Column, Reported, columns, different_options, labels, shown
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
    """
    names = labels(runs)
    colours = [_colour(number) for number in range(len(runs))]
    data = {
        "runs": [{"label": name, "colour": colour} for name, colour in zip(names, colours, strict=True)],
        "charts": [drawn for chart in CHARTS if (drawn := _chart(chart, runs))],
    }
    parts = {
        "TITLE": html.escape(names[0] if len(runs) == 1 else counted(len(runs), "run")),
        "DATE": datetime.now().strftime("%Y-%m-%d %H:%M"),
        "TABLE": _table(columns(runs), names, colours),
        "OPTIONS": _options(runs, names),
        "IMAGES": _media(runs, names, colours, "images"),
        "TEXTS": _media(runs, names, colours, "texts"),
        "STYLE": _of_uplot("uPlot.min.css") + _file("page.css"),
        "LIBRARY": _of_uplot("uPlot.iife.js"),
        "SCRIPT": _file("page.js"),
        # Without <, so that no label can end the script element.
        "DATA": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    pieces = _file("page.html").split("@@")  # text and names of parts alternate
    return "".join(parts[piece] if place % 2 else piece for place, piece in enumerate(pieces))


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


def _table(found: list[Column], names: list[str], colours: list[str]) -> str:
    head = "".join(f'<th class="{"number" if column.figures else ""}">{html.escape(column.name)}</th>' for column in found)
    rows = []
    for number, (name, colour) in enumerate(zip(names, colours, strict=True)):
        cells = [f'<th scope="row"><i style="background:{colour}"></i>{html.escape(name)}</th>']
        for column in found:
            kinds = ["number"] if column.figures else []
            if column.best is not None and column.figures[number] == column.best:
                kinds.append("best")
            cells.append(f'<td class="{" ".join(kinds)}">{html.escape(column.cells[number])}</td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table><thead><tr><th>run</th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _options(runs: list[Reported], names: list[str]) -> str:
    """A table of all options in which the runs differ; empty if there are none."""
    options = different_options(runs)
    if not options:
        return ""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    rows = []
    for key, values in options.items():
        cells = "".join(f"<td>{html.escape(shown(value))}</td>" for value in values)
        rows.append(f'<tr><th scope="row">{html.escape(key)}</th>{cells}</tr>')
    count = f"{counted(len(options), 'option')} in which the runs differ"
    table = f"<table><thead><tr><th>option</th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<details><summary>{count}</summary><div class="wide">{table}</div></details>'


def _media(runs: list[Reported], names: list[str], colours: list[str], kind: Literal["images", "texts"]) -> str:
    """The images or texts of all runs, those of a tag next to each other; empty if there are none."""
    shown = []
    for tag in sorted({tag for run in runs for tag in getattr(run, kind)}):
        for number, run in enumerate(runs):
            medium: Medium | None = getattr(run, kind).get(tag)
            if medium is None:
                continue
            title = f"<h3>{html.escape(tag)}<span>, step {int(medium.step)}</span></h3>"
            of = f'<div class="key"><span><i style="background:{colours[number]}"></i>{html.escape(names[number])}</span></div>'
            content = html.escape(medium.content)
            body = f'<img alt="{html.escape(tag)}" src="{content}">' if kind == "images" else f"<pre>{content}</pre>"
            caption = f"<figcaption>{title}{of if len(runs) > 1 else ''}</figcaption>"
            shown.append(f'<figure data-run="{number}">{caption}{body}</figure>')
    return f'<section class="{kind}">{"".join(shown)}</section>' if shown else ""


def _colour(number: int) -> str:
    """Distinct on light and dark backgrounds; after the tenth, hues at the golden angle."""
    return COLOURS[number] if number < len(COLOURS) else f"hsl({number * 137.5 % 360:.0f} 55% 52%)"


def _of_uplot(name: str) -> str:
    """A file of uPlot, from the package uplot-python, which is not imported."""
    try:
        return Path(str(distribution("uplot-python").locate_file(f"uplot/static/{name}"))).read_text(encoding="utf-8")
    except PackageNotFoundError:
        raise UserError("report: uplot-python is not installed; pip install 'holotrain[report]'") from None


def _file(name: str) -> str:
    return resources.files("holotrain.dashboard").joinpath(name).read_text(encoding="utf-8")
