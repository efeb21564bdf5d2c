"""Whatever files say, no address is contacted, no program is started, and nothing outside of their folder is opened."""

import gzip
import io
import json
import lzma
import os
import re
import shutil
import signal
import socket
import subprocess
import zipfile
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import transformers
from covering import name_of
from data_files import write_folder
from PIL import Image
from small_run import SMALL
from watched import watched

from holotrain.data import HubImages, HubText, ImageFolder, TextFiles
from holotrain.data.hub import depth_of
from holotrain.data.image_files import image_files
from holotrain.data.images import IMAGENET
from holotrain.errors import UserError

QUICK = [word for word in SMALL if not word.startswith("model.")]
QUICK += ["trainer.max_epochs=1", "logger=none", "callbacks.progress=null", "test=false", "hydra.run.dir=run"]
NETWORK = ["task=image_classification", "data=digits", "model=huggingface", "model.name=network"]
HERE = "http://127.0.0.1:9/x"
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(ran) (w) file closefile\nshowpage\n"
LINES = "".join(f"line {number} of some text\n" for number in range(40))
VIT = {"model_type": "vit", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
VIT |= {"image_size": 8, "patch_size": 4, "num_channels": 1}


@pytest.fixture(autouse=True)
def attempts(tmp_path, monkeypatch):
    """What the test tries to do outside. Nothing is downloaded for want of a network alone, and nothing waits for ever."""
    monkeypatch.chdir(tmp_path)
    Path("secret.png").write_bytes(picture())
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits"))
    signal.alarm(240)
    with watched(tmp_path / "secret.png") as noted:
        yield noted
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    assert noted == []


def picture(colour: str = "red") -> bytes:
    path = Path("picture.png")
    Image.new("RGB", (8, 8), colour).save(path)
    content = path.read_bytes()
    path.unlink()
    return content


def images(name: str, **options) -> HubImages:
    return HubImages(name, image_size=8, batch_size=2, val_fraction=0.4, cache_dir="cache", **options)


def text(kind: type, name: str, **options) -> HubText | TextFiles:
    held = {"unit": "line", "val_fraction": 0.2, "test_fraction": 0.2, "cache_dir": "cache"}
    return kind(name, context=16, batch_size=2, epoch_batches=2, **held, **options)


def read(data) -> None:
    """All of it, as ``fit`` does."""
    data.prepare_data()
    data.setup()
    for loader in (data.train_dataloader(), data.val_dataloader()):
        list(loader)


def refused(data, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        read(data)
    assert "\n" not in str(error.value)


def test_what_is_watched_for_is_noticed(attempts):
    for attempt in (
        lambda: socket.create_connection(("127.0.0.1", 9)),
        lambda: socket.getaddrinfo("localhost", 80),
        lambda: subprocess.run(["true"]),
        lambda: Path("secret.png").read_bytes(),
    ):
        with pytest.raises(OSError, match="refused by the test"):
            attempt()
        assert len(attempts) == 1
        attempts.clear()


IMAGE_FILES = {
    "PostScript": lambda path: path.write_bytes(POSTSCRIPT),
    "a bomb": lambda path: Image.new("1", (13_500, 13_500)).save(path, "PNG"),
}


@pytest.mark.parametrize("kind", IMAGE_FILES)
def test_no_image_starts_a_program_or_fills_the_memory(kind):
    """In a folder, in a row, and among the files to predict."""
    write_folder(Path("photos"))
    IMAGE_FILES[kind](Path("photos/val/dog/0.png"))
    shutil.copy("photos/val/dog/0.png", "a.jpg")
    pq.write_table(table_of({"bytes": Path("a.jpg").read_bytes(), "path": "a.jpg"}), "a.parquet")
    reason = "Image size .* exceeds limit of" if kind == "a bomb" else "it is none of BMP, GIF, JPEG, PNG"
    refused(ImageFolder("photos", image_size=8, batch_size=2), f"photos/val/dog/0.png is not a readable image .*{reason}")
    refused(images("a.parquet"), rf"row \d+ holds no readable image \({reason}")
    with pytest.warns(UserWarning, match=reason):
        ((_, paths),) = image_files(Path("a.jpg"), 3, 8, IMAGENET, batch_size=2)
    assert list(paths) == [""] and not Path("ran").exists()


def table_of(first: dict, **more) -> pa.Table:
    """Images in which ``first`` comes four times, with labels, as the datasets library would write them."""
    red, blue = ({"bytes": picture(colour), "path": None} for colour in ("red", "blue"))
    columns = {"image": [first] * 4 + [red, blue] * 8, "label": ["a", "b"] * 10, **more}
    features = datasets.Features({name: datasets.Value("string") for name in columns} | {"image": datasets.Image()})
    return pa.table(columns, schema=features.arrow_schema)


@pytest.mark.parametrize("name", [HERE, "../secret.png", "link.png", "pipe.png"])
def test_no_row_names_an_image_elsewhere(name):
    Path("in").mkdir()
    Path("in/link.png").symlink_to(Path("secret.png").absolute())
    os.mkfifo("in/pipe.png")
    pq.write_table(table_of({"bytes": None, "path": name}), "in/a.parquet")
    refused(images("in/a.parquet"), r"holds no readable image \(.*is no file in ")


@pytest.mark.parametrize("kind", ["a file", "a split"])
def test_what_a_saved_data_set_says_of_its_files_is_not_followed(kind):
    for folder in ("other", "in/train"):
        datasets.Dataset.from_dict({"text": [f"{folder} {row}" * 9 for row in range(20)]}).save_to_disk(folder)
    if kind == "a split":
        Path("in/dataset_dict.json").write_text(json.dumps({"splits": ["train", "../other"]}))
    else:
        state = json.loads(Path("in/train/state.json").read_text())
        state["_data_files"][0]["filename"] = "../../other/data-00000-of-00001.arrow"
        Path("in/train/state.json").write_text(json.dumps(state))
    (rows,) = text(HubText, "in").opened().values()
    assert len(rows) == 20 and all(row.startswith("in/train") for row in rows["text"])


@pytest.mark.parametrize("link", ["in/train/data-00000-of-00001.arrow", "in/train", "in/a.txt"])
def test_no_link_leads_out_of_a_folder_of_data(link):
    datasets.Dataset.from_dict({"text": ["some text"] * 20}).save_to_disk("other/train")
    Path("other/a.txt").write_text(LINES)
    Path("in").mkdir()
    if link.endswith("arrow"):
        shutil.copytree("other/train", "in/train")
        Path(link).unlink()
    Path(link).symlink_to(Path("other", *Path(link).parts[1:]).absolute())
    refused(text(HubText, "in"), r"^data: cannot read in \(.*is no file in .*in\)")


CARD = "configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: ../secret.png\n"


def test_a_folder_is_read_as_it_is_whatever_its_card_says():
    Path("in").mkdir()
    Path("in/README.md").write_text(f"---\n{CARD}---\n")
    Path("in/.huggingface.yaml").write_text(CARD)
    refused(text(HubText, "in"), r"^data: cannot read in \(.* doesn't contain any data files\)$")
    Path("in/a.txt").write_text(LINES)
    read(text(HubText, "in"))


NETWORKS = {
    "an architecture of the Hub": {"model_type": "timm_wrapper", "architecture": "hf_hub:nobody/nothing"},
    "a backbone": {"model_type": "dpt", "backbone": "nobody/nothing", "use_pretrained_backbone": True},
    "kernels": VIT | {"attn_implementation": "kernels-community/nothing"},
    "no heads": VIT | {"num_attention_heads": 0},
}  # fmt: skip
"""What a config.json may hold."""


def write_network(folder: Path, network: dict) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(network))


@pytest.mark.parametrize("kind", NETWORKS)
def test_no_configuration_of_a_network_leads_elsewhere_or_to_a_traceback(holotrain, kind):
    write_network(Path("network"), NETWORKS[kind])
    err = holotrain.refused("fit", *NETWORK, *QUICK)
    assert re.search(
        "elsewhere, which is not opened|is not one of eager|has no AutoModelForImageClassification|cannot be built", err
    ), err


def write_weights(folder: Path) -> None:
    """Of a model such as VIT, for the ten classes of digits."""
    sizes = {name: value for name, value in VIT.items() if name != "model_type"}
    transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, num_labels=10)).save_pretrained(folder)


INDEX = {"metadata": {}, "weight_map": {"classifier.bias": "../other/model.safetensors"}}
ADAPTER = {"base_model_name_or_path": "other", "peft_type": "LORA"}
ELSEWHERE = {"model.safetensors.index.json": INDEX, "adapter_config.json": ADAPTER, "model.safetensors": None}


@pytest.mark.parametrize(("name", "content"), ELSEWHERE.items())
def test_no_folder_of_weights_leads_elsewhere(holotrain, name, content):
    """Not by its index, by an adapter's configuration or by a link."""
    write_weights(Path("other"))
    write_network(Path("network"), VIT)
    write_network(Path("crafted"), VIT)
    if content is None:
        Path("crafted", name).symlink_to(Path("other", name).absolute())
    else:
        Path("crafted", name).write_text(json.dumps(content))
    if content is ADAPTER:
        shutil.copy("other/model.safetensors", "crafted")
    err = holotrain.refused("fit", *QUICK, *NETWORK, "model.name=crafted")
    assert re.search("which is not in the same folder|a link that leads out|crafted holds an adapter of another model", err)


def test_a_configuration_does_not_choose_the_weights(holotrain):
    """``from_pretrained`` would read those that it names."""
    write_weights(Path("crafted"))
    write_network(Path("network"), VIT)
    write_network(Path("crafted"), VIT | {"transformers_weights": "evil.safetensors"})
    Path("crafted/evil.safetensors").symlink_to("/dev/zero")
    status, _, err = holotrain("fit", *QUICK, *NETWORK, "model.name=crafted")
    assert (status, err) == (0, "24 tensors of crafted\n")


def test_no_tokenizer_of_a_model_names_a_file(holotrain):
    gpt = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 260, "n_positions": 32}
    write_network(Path("network"), gpt)
    Path("network/tokenizer_config.json").write_text(json.dumps({"init_inputs": ["../secret.png"]}))
    Path("a.txt").write_text(LINES)
    words = ["task=causal_lm", "data=text_files", "data.files=a.txt", "data.context=16", "data.unit=line"]
    err = holotrain.refused("fit", *QUICK, *words, "model=huggingface", "model.name=network")
    assert "secret.png', which is not opened" in err


@pytest.mark.parametrize(("file", "kind", "name"), [("a.txt", TextFiles, "in/a.txt"), ("a.jsonl", HubText, "in")])
def test_no_pipe_is_waited_for_among_texts(file, kind, name):
    Path("in").mkdir()
    os.mkfifo(Path("in", file))
    refused(text(kind, name), "^data")
    with pytest.raises(UserError, match=r"data\.tokenizer: cannot read"):
        TextFiles("b.txt", tokenizer=f"in/{file}")


def zipped(content: bytes) -> bytes:
    """A zip file that begins with text."""
    written = io.BytesIO(content)
    with zipfile.ZipFile(written, "a") as archive:
        archive.writestr("x.txt", content)
    return written.getvalue()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, zipped], ids=name_of)
def test_no_archive_is_unpacked(pack, streaming):
    """Whatever it is called."""
    Path("a.txt").write_bytes(pack(LINES.encode()))
    refused(text(TextFiles, "a.txt", streaming=streaming), "a.txt is compressed; unpack it")


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_of_json_that_are_nested_deeply_are_refused(streaming):
    """Arrow calls itself for each list, and would end the process."""
    Path("a.jsonl").write_text('{"text": "[[[", "a": ' + "[" * 20000 + "]" * 20000 + "}\n")
    refused(text(TextFiles, "a.jsonl", streaming=streaming), "a.jsonl, line 1: more than 1000 lists")


def test_brackets_in_strings_are_not_nested():
    assert depth_of(b'{"a": "[[[[\\"[[", "b": [1, [2]]}') == 3
