"""The page of a report: what it says, and that it needs nothing else."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from holotrain.dashboard.charts import CHARTS
from holotrain.dashboard.logs import Curve
from holotrain.dashboard.page import POINTS, page
from holotrain.dashboard.table import Reported, changed, columns, different_options, labels


def curve(*values: float) -> Curve:
    steps = np.arange(len(values))
    return Curve(steps, np.array(values, dtype=float), 1e9 + 0.5 * steps)


def reported(folder: str, lr: float, accuracy: float | None, **curves: Curve) -> Reported:
    config = {"optimizer": {"kind": "adamw", "lr": lr, "eps": 1e-8}, "model": {"kind": "rev_vit"}, "output_dir": folder}
    summary = {
        "status": "completed", "overrides": [f"optimizer.lr={lr}", "output_dir=x"], "device": "cpu", "parameters": 7,
        "metrics": {"train/loss": 0.5, "val/loss": 0.25, "val/accuracy": accuracy}, "steps": 10, "seconds": 1.5,
        "samples_per_second": 100.0, "tokens_per_second": None, "step_seconds": 0.01, "peak_memory_bytes": 2**21,
    }  # fmt: skip
    curves = {"train/loss": curve(3, 2, 1)} | {tag.replace("__", "/"): found for tag, found in curves.items()}
    return Reported(Path(folder), config, summary, curves)


class Read(HTMLParser):
    """The elements of a page with their attributes, rows of tables, and what stands in #data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.rows: list[list[str]] = []
        self.data, self.inside = "", []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.inside.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        while self.inside and self.inside.pop()[0] != tag:
            pass

    def handle_data(self, data):
        if ("script", "data") in [(tag, attrs.get("id")) for tag, attrs in self.inside]:
            self.data += data
        if {"td", "th"} & {tag for tag, _ in self.inside}:
            self.rows[-1][-1] += data


def test_the_table_begins_with_what_differs_and_ends_with_the_folder():
    read = Read(page([reported("a", 1e-3, 0.5), reported("b", 3e-3, 0.75)]))
    head, first, second, *options = read.rows
    assert head[:3] == ["run", "optimizer.lr", "val/accuracy"] and head[-2:] == ["status", "folder"]
    assert first[:3] == ["lr=0.001", "0.001", "0.5"] and second[:3] == ["lr=0.003", "0.003", "0.75"]
    assert dict(zip(head, second, strict=True))["peak memory, MiB"] == "2"
    assert second[-2:] == ["completed", "b"]
    assert options == [["option", "lr=0.001", "lr=0.003"], ["optimizer.lr", "0.001", "0.003"]]


def test_the_page_asks_for_nothing_from_elsewhere():
    text = page([reported("a", 1e-3, 0.5)])
    read = Read(text)
    assert not [name for _, attrs in read.elements for name in attrs if name in ("src", "href", "srcset", "action", "data")]
    assert {tag for tag, _ in read.elements}.isdisjoint({"link", "iframe", "img", "object", "embed", "base"})
    styles = re.search("<style>(.*?)</style>", text, re.DOTALL)[1]
    assert "url(" not in styles and "@import" not in styles
    assert "default-src 'none'" in next(attrs["content"] for _, attrs in read.elements if "http-equiv" in attrs)
    library = re.search(r"<script>(.*?)</script>", text, re.DOTALL)[1]
    assert "https://" not in text.replace(library, "") and "fetch(" not in library and "XMLHttpRequest" not in library
    assert "Leon Sorokin" in text and "MIT Licensed" in text


def test_charts_hold_every_run_and_leave_out_what_nobody_logged():
    more = {"memory__peak_bytes": curve(2**20, 2**21), "val__loss": curve(2.5)}
    data = json.loads(Read(page([reported("a", 1e-3, 0.5), reported("b", 3e-3, 0.5, **more)])).data)
    charts = {chart["title"]: chart for chart in data["charts"]}
    assert list(charts) == ["Loss", "Memory"] and charts["Memory"]["unit"] == "bytes"
    assert [(line["run"], line["line"]) for line in charts["Loss"]["lines"]] == [(0, 0), (1, 0), (1, 1)]
    assert charts["Loss"]["lines"][0] == {"run": 0, "line": 0, "x": [0, 1, 2], "t": [0.0, 0.5, 1.0], "y": [3.0, 2.0, 1.0]}
    assert [run["label"] for run in data["runs"]] == ["lr=0.001", "lr=0.003"]


def test_a_long_run_of_every_scalar_stays_below_a_megabyte():
    noise = np.random.default_rng(0).normal(1, 0.1, 200_000)
    every = {tag: curve(*noise) for chart in CHARTS for tag in chart.lines}
    run = Reported(Path("long"), {}, {}, every)
    text = page([run])
    assert len(text) < 2**20
    for chart in json.loads(Read(text).data)["charts"]:
        for line in chart["lines"]:
            assert len(line["x"]) <= POINTS + 2 and len(line["smooth"]["x"]) <= POINTS / 4 + 2
            assert max(line["y"]) == pytest.approx(noise.max(), rel=1e-4)
            assert np.std(line["smooth"]["y"]) < 0.1 * np.std(line["y"])


def test_names_cannot_write_into_the_page_and_gaps_break_nothing():
    evil = "<script><b>&<!--"
    runs = [reported(evil, 1e-3, None, **{"val__loss": curve(float("nan"), float("inf")), "reversible__drift": curve(0.0)})]
    read = Read(page(runs))
    data = json.loads(read.data)
    assert data["runs"][0]["label"] == evil and "b" not in {tag for tag, _ in read.elements}
    assert [chart["title"] for chart in data["charts"]] == ["Loss", "Error of recomputed activations"]
    assert [line["line"] for line in data["charts"][0]["lines"]] == [0]  # nothing finite of val/loss


def test_what_was_changed_and_what_came_along():
    one, other = reported("a", 1e-3, 0.5), reported("b", 3e-3, 0.5)
    other.config["model"]["kind"], other.config["optimizer"]["eps"] = "vit", 1e-6
    other.summary["overrides"].append("model=vit_tiny")
    assert changed([one, other]) == {"optimizer.lr": [1e-3, 3e-3], "model": ["rev_vit", "vit_tiny"]}
    assert list(different_options([one, other])) == ["optimizer.lr", "optimizer.eps", "model.kind"]
    assert labels([one, other]) == ["lr=0.001, model=rev_vit", "lr=0.003, model=vit_tiny"]
    same = [reported("x/2026-01-01_00-00-00/0", 1e-3, 0.5), reported("y/2026-01-01_00-00-00/0", 1e-3, 0.5)]
    assert labels(same) == [str(run.folder) for run in same]
    same[1].folder = Path("x/2026-01-01_00-00-00/1")
    assert labels(same) == ["2026-01-01_00-00-00/0", "2026-01-01_00-00-00/1"]


def test_a_run_without_summary_is_unfinished_and_shows_its_last_figures():
    going = Reported(Path("going"), {"optimizer": {"lr": 1.0}}, {}, {"val/accuracy": curve(0.1, 0.4), "epoch": curve(1)})
    cells = {column.name: column for column in columns([going, reported("a", 0.5, 0.3)])}
    assert cells["status"].cells == ["unfinished", "completed"] and cells["optimizer.lr"].cells == ["1", "0.5"]
    assert cells["val/accuracy"].cells == ["0.4", "0.3"] and cells["val/accuracy"].best == pytest.approx(0.4)
    assert cells["samples/s"].cells == ["", "100"] and cells["samples/s"].best is None
    assert "epoch" not in cells
