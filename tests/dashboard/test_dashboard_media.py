"""Images and texts on the report page. Event files are data: what they hold must not become part of the page."""

import base64
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from holotrain.dashboard.logs import (
    CHARACTERS,
    IMAGE_BYTES,
    TAGS,
    image_uri,
    read_events,
    read_images,
    read_scalars,
    read_texts,
)
from holotrain.dashboard.page import page
from holotrain.dashboard.table import Reported

EVIL = '</pre><script>alert(1)</script><img src="https://example.org/x.png" onerror="alert(2)">'
SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(3)</script></svg>'


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


def reported(folder: Path, name: str = "run") -> Reported:
    events = read_events(folder)
    return Reported(Path(name), {}, {}, read_scalars(folder, events), read_images(events), read_texts(events))


class Read(HTMLParser):
    """Elements of the page with their attributes; what stands in captions and in texts; the number of runs of figures."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements, self.inside, self.captions, self.texts = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.inside.append(tag)
        if tag in ("figcaption", "pre"):
            (self.captions if tag == "figcaption" else self.texts).append("")

    def handle_endtag(self, tag):
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data):
        for tag, kept in (("figcaption", self.captions), ("pre", self.texts)):
            if tag in self.inside:
                kept[-1] += data

    def of(self, name):
        return [attrs for tag, attrs in self.elements if tag == name]


def test_the_last_image_and_text_of_each_tag_are_shown(tmp_path):
    writer = SummaryWriter(tmp_path / "tensorboard")
    for step, shade in ((3, 10), (7, 200)):
        writer.add_image("val/confusion_matrix", np.full((4, 5, 3), shade, np.uint8), step, dataformats="HWC")
        writer.add_text("val/samples", f"text of {step}", step)
        writer.add_histogram("weights/a", np.arange(5), step)
    writer.close()
    run = reported(tmp_path)
    read = Read(page([run]))
    assert read.captions == ["val/confusion_matrix, step 7", "val/samples, step 7"] and read.texts == ["text of 7"]
    (image,) = read.of("img")
    start, _, content = image["src"].partition(",")
    assert start == "data:image/png;base64" and image["alt"] == "val/confusion_matrix"
    assert np.asarray(Image.open(io.BytesIO(base64.b64decode(content)))).tolist() == [[[200] * 3] * 5] * 4
    assert list(run.texts) == ["val/samples"]  # no other tensors


def test_texts_and_tags_are_plain_text(tmp_path):
    run = reported(crafted(tmp_path, {EVIL: encoded()}, {EVIL: EVIL}), "<b>run")
    text = page([run, reported(tmp_path, "other")])
    read = Read(text)
    assert read.texts == [EVIL, EVIL] and all(caption.startswith(f"{EVIL}, step 1") for caption in read.captions)
    assert len(read.captions) == 4 and read.captions[0] == f"{EVIL}, step 1<b>run" and not read.of("b")
    assert len(read.of("script")) == 3 and not any("onerror" in attrs for _, attrs in read.elements)
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
        (b"<script>alert(1)</script>", None),
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
    images = reported(crafted(tmp_path, {"x": content}, {})).images
    assert [medium.content for medium in images.values()] == ([uri] if uri else [])


def test_what_a_run_may_bring_is_limited(tmp_path):
    many = {f"{index:03}": encoded() for index in range(TAGS + 5)}
    run = reported(crafted(tmp_path, many, {name: "x" * (CHARACTERS + 1000) for name in many}))
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
    run = reported(tmp_path)
    assert run.texts["broken"].content == "\ufffd<b>\nsecond" and Read(page([run])).texts[0] == "\ufffd<b>\nsecond"
    assert "numbers" not in run.texts


def test_runs_stand_side_by_side_and_can_be_hidden(tmp_path):
    runs = [reported(crafted(tmp_path / name, {"a": encoded(), "b": encoded()}, {}), name) for name in ("one", "two")]
    read = Read(page(runs))
    assert read.captions == ["a, step 1one", "a, step 1two", "b, step 1one", "b, step 1two"]
    assert [attrs["data-run"] for attrs in read.of("figure")] == ["0", "1", "0", "1"]
    assert not Read(page([Reported(Path("none"), curves=runs[0].curves)])).of("section")
