"""The page of a report: what it says, what it needs, and that nothing in event files, which are data, becomes a part of it."""

import base64
import io
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from holotrain.dashboard.charts import CHARTS
from holotrain.dashboard.logs import (
    CHARACTERS,
    IMAGE_BYTES,
    TAGS,
    Curve,
    image_uri,
    read_events,
    read_images,
    read_scalars,
    read_texts,
)
from holotrain.dashboard.page import POINTS, page
from holotrain.dashboard.table import Reported, columns, different_options, labels

EVIL = '</pre><script>alert(1)</script><img src="https://example.org/x.png" onerror="alert(2)">'
SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(3)</script></svg>'


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
    """The elements of a page in order: tag, attributes, and all text in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[list] = []
        self.inside: list[list] = []
        self.feed(text)
        self.captions, self.texts = ([text for tag, _, text in self.elements if tag == name] for name in ("figcaption", "pre"))
        self.data = "".join(text for _, attrs, text in self.elements if attrs.get("id") == "data")
        self.rows: list[list[str]] = []
        for tag, _, text in self.elements:
            if tag == "tr":
                self.rows.append([])
            elif tag in ("td", "th"):
                self.rows[-1].append(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append([tag, dict(attrs), ""])
        self.inside.append(self.elements[-1])

    def handle_endtag(self, tag):
        while self.inside and self.inside.pop()[0] != tag:
            pass

    def handle_data(self, data):
        for element in self.inside:
            element[2] += data

    def of(self, name):
        return [attrs for tag, attrs, _ in self.elements if tag == name]


def test_the_table_begins_with_what_differs_and_ends_with_the_folder():
    read = Read(page([reported("a", 1e-3, 0.5), reported("b", 3e-3, 0.75)]))
    head, first, second, *options = read.rows
    assert head[:3] == ["run", "optimizer.lr", "val/accuracy"] and head[-2:] == ["status", "folder"]
    assert first[:3] == ["lr=0.001", "0.001", "0.5"] and second[:3] == ["lr=0.003", "0.003", "0.75"]
    assert dict(zip(head, second, strict=True))["peak memory, MiB"] == "2"
    assert second[-2:] == ["completed", "b"]
    assert options == [["option", "lr=0.001", "lr=0.003"], ["optimizer.lr", "0.001", "0.003"]]


def test_what_was_chosen_is_shown_also_of_resumed_runs_of_own_classes_and_of_failed_jobs():
    first, resumed, own = (reported(name, 0.1, 0.5) for name in ("first", "resumed", "own"))
    first.summary["overrides"] = ["model=gpt_tiny", "+model.dim=16"]
    resumed.summary |= {"overrides": ["resume=true"], "choices": {"model": "roberta_tiny"}}
    own.summary["overrides"] = ["model._target_=mine.Net"]
    for run, kind in ((first, "gpt"), (own, "Net")):
        run.config["model"] = {"kind": kind}
    failed = Reported(Path("2"), words=["model=gpt_tiny"], failure="out of memory at step 1")
    cells = {column.name: column.cells for column in columns([first, resumed, own, failed])}
    assert cells["model"] == ["gpt_tiny", "roberta_tiny", "Net", "gpt_tiny"] and "model._target_" not in cells
    assert cells["status"] == [*["completed"] * 3, "failed: out of memory at step 1"]
    assert all(any(column) for column in cells.values()) and "tokens/s" not in cells


def test_the_page_asks_for_nothing_from_elsewhere():
    text = page([reported("a", 1e-3, 0.5)])
    read = Read(text)
    assert not [name for _, attrs, _ in read.elements for name in attrs if name in ("src", "href", "srcset", "action", "data")]
    assert {tag for tag, _, _ in read.elements}.isdisjoint({"link", "iframe", "img", "object", "embed", "base"})
    styles = re.search("<style>(.*?)</style>", text, re.DOTALL)[1]
    assert "url(" not in styles and "@import" not in styles
    assert "default-src 'none'" in next(attrs["content"] for _, attrs, _ in read.elements if "http-equiv" in attrs)
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
    assert data["runs"][0]["label"] == evil and "b" not in {tag for tag, _, _ in read.elements}
    assert [chart["title"] for chart in data["charts"]] == ["Loss", "Error of recomputed activations"]
    assert [line["line"] for line in data["charts"][0]["lines"]] == [0]  # nothing finite of val/loss


def test_a_run_without_summary_is_unfinished_and_shows_its_last_figures():
    going = Reported(Path("going"), {"optimizer": {"lr": 1.0}}, {}, {"val/accuracy": curve(0.1, 0.4), "epoch": curve(1)})
    cells = {column.name: column for column in columns([going, reported("a", 0.5, 0.3)])}
    assert cells["status"].cells == ["unfinished", "completed"] and cells["optimizer.lr"].cells == ["1", "0.5"]
    assert cells["val/accuracy"].cells == ["0.4", "0.3"] and cells["val/accuracy"].best == pytest.approx(0.4)
    assert cells["samples/s"].cells == ["", "100"] and cells["samples/s"].best is None
    assert "epoch" not in cells
    lost = [Reported(Path(str(value)), {}, {}, {"val/accuracy": curve(value)}) for value in (0.1, float("nan"), 0.4)]
    for runs in itertools.permutations(lost):
        assert {column.name: column.best for column in columns(runs)}["val/accuracy"] == pytest.approx(0.4)


def encoded(kind: str = "PNG", size: int = 4) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (size, size), "red").save(file, kind)
    return file.getvalue()


def crafted(folder: Path, images: dict[str, bytes], texts: dict[str, str], step: int = 1) -> Path:
    """An event file with bytes of any kind as images."""
    writer = SummaryWriter(folder / "tensorboard")
    for tag, content in images.items():
        image = Summary.Image(height=4, width=4, colorspace=3, encoded_image_string=content)
        writer._get_file_writer().add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)
    for tag, text in texts.items():
        writer.add_text(tag, text, step)
    writer.add_scalar("train/loss", 1.0, step)
    writer.close()
    return folder


def read_back(folder: Path, name: str = "run") -> Reported:
    events = read_events(folder)
    return Reported(Path(name), {}, {}, read_scalars(folder, events), read_images(events), read_texts(events))


def test_the_last_image_and_text_of_each_tag_are_shown(tmp_path):
    writer = SummaryWriter(tmp_path / "tensorboard")
    for step, shade in ((3, 10), (7, 200)):
        writer.add_image("val/confusion_matrix", np.full((4, 5, 3), shade, np.uint8), step, dataformats="HWC")
        writer.add_text("val/samples", f"text of {step}", step)
        writer.add_histogram("weights/a", np.arange(5), step)
    writer.close()
    run = read_back(tmp_path)
    read = Read(page([run]))
    assert read.captions == ["val/confusion_matrix, step 7", "val/samples, step 7"] and read.texts == ["text of 7"]
    (image,) = read.of("img")
    start, _, content = image["src"].partition(",")
    assert start == "data:image/png;base64" and image["alt"] == "val/confusion_matrix"
    assert np.asarray(Image.open(io.BytesIO(base64.b64decode(content)))).tolist() == [[[200] * 3] * 5] * 4
    assert list(run.texts) == ["val/samples"]  # no other tensors


def test_texts_and_tags_are_plain_text(tmp_path):
    run = read_back(crafted(tmp_path, {EVIL: encoded()}, {EVIL: EVIL}), "<b>run")
    text = page([run, read_back(tmp_path, "other")])
    read = Read(text)
    assert read.texts == [EVIL, EVIL] and all(caption.startswith(f"{EVIL}, step 1") for caption in read.captions)
    assert [attrs["data-run"] for attrs in read.of("figure")] == ["0", "1", "0", "1"]
    assert len(read.captions) == 4 and read.captions[0] == f"{EVIL}, step 1<b>run" and not read.of("b")
    assert len(read.of("script")) == 3 and not any("onerror" in attrs for _, attrs, _ in read.elements)
    assert [attrs["src"][:22] for attrs in read.of("img")] == ["data:image/png;base64,"] * 2
    assert EVIL not in text
    policy = next(attrs["content"] for attrs in read.of("meta") if "http-equiv" in attrs)
    assert "default-src 'none'" in policy and policy.endswith("img-src data:")


@pytest.mark.parametrize(
    ("content", "start"),
    [
        (encoded("PNG"), "data:image/png;base64,"),
        (encoded("JPEG"), "data:image/jpeg;base64,"),
        (encoded("GIF"), None),
        (SVG, None),
        (b" " + encoded("PNG"), None),
        (b"", None),
        (encoded("PNG").ljust(IMAGE_BYTES + 1, b"\0"), None),
        (encoded("PNG") + b'"><script>', "data:image/png;base64,"),
    ],
)
def test_only_png_and_jpeg_are_images(content, start, tmp_path):
    uri = image_uri(content)
    assert (uri is None) == (start is None)
    if uri is not None:
        assert uri.startswith(start) and re.fullmatch(r"[A-Za-z0-9+/=]+", uri.removeprefix(start))
    images = read_back(crafted(tmp_path, {"x": content}, {})).images
    assert [medium.content for medium in images.values()] == ([uri] if uri else [])


def test_what_a_run_may_bring_is_limited(tmp_path):
    many = {f"{index:03}": encoded() for index in range(TAGS + 5)}
    run = read_back(crafted(tmp_path, many, {name: "x" * (CHARACTERS + 1000) for name in many}))
    assert len(run.images) == len(run.texts) == TAGS
    assert run.texts["000"].content == "x" * CHARACTERS + "\n... (1,000 more characters)"


def test_a_text_of_broken_bytes_is_read(tmp_path):
    from tensorboard.compat.proto.summary_pb2 import SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto

    writer = SummaryWriter(tmp_path / "tensorboard")
    about = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    for tag, tensor in (
        ("broken", TensorProto(dtype="DT_STRING", string_val=[b"\xff<b>", b"second"])),
        ("numbers", TensorProto(dtype="DT_FLOAT", float_val=[1.0])),
    ):
        writer._get_file_writer().add_summary(Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=about)]), 1)
    writer.close()
    run = read_back(tmp_path)
    assert run.texts["broken"].content == "\ufffd<b>\nsecond" and Read(page([run])).texts[0] == "\ufffd<b>\nsecond"
    assert "numbers" not in run.texts


def test_names_and_tags_of_runs_are_shown():
    runs = [reported(f"run{lr}", lr, 0.5) for lr in (0.1, 0.2, 0.3)]
    for run, (name, tags) in zip(runs, (("base", ["long", "old"]), ("wide", []), (None, None)), strict=True):
        run.config |= {"name": name, "tags": tags}
        run.summary["overrides"] += [f"name={name}"]
    assert labels(runs) == ["base", "wide", "lr=0.3"]
    named = {column.name: column.cells for column in columns(runs)}
    assert (named["name"], named["tags"]) == (["base", "wide", ""], ["long, old", "", ""])
    assert "name" not in different_options(runs)
    runs[1].config["name"] = "base"
    assert labels(runs) == ["lr=0.1", "lr=0.2", "lr=0.3"]


def test_the_best_of_a_metric_that_selects_checkpoints_is_marked_in_its_direction():
    runs = [reported(f"run{lr}", lr, 0.5) for lr in (0.1, 0.2)]
    for run, value in zip(runs, (0.3, 0.7), strict=True):
        run.summary["metrics"] |= {"val/f1": value, "test/f1": value, "val/other": value, "val/perplexity": value}
        run.summary |= {"monitor": "val/f1", "mode": "max"}
    best = {column.name: column.best for column in columns(runs)}
    assert [best[name] for name in ("val/f1", "test/f1", "val/other", "val/perplexity")] == [0.7, 0.7, None, 0.3]
