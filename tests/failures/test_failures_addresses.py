"""Whatever files say, no address is contacted, no program is started, and nothing outside of their folder is opened."""

import bz2
import gzip
import json
import lzma
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import zipfile
from contextlib import nullcontext
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from covering import slow, thinned
from data_files import write_folder
from made_once import made_once
from PIL import ExifTags, Image
from small_run import SMALL, fit_in, run_in
from watched import watched

from holotrain.data import limits

SIZES = [word for word in SMALL if word.startswith("model.")]
QUICK = [word for word in SMALL if word not in SIZES]
QUICK += ["trainer.max_epochs=1", "logger=none", "callbacks.progress=null", "test=false", "hydra.run.dir=run"]
WORDS = ["task=causal_lm", "data.context=16", "data.batch_size=2", "data.cache_dir=cache", "data.val_fraction=0.2"]
WORDS += ["data.test_fraction=0.2", "data.unit=line"]
TEXT = [*SIZES, *WORDS]
PICTURES = [*SIZES, "model=vit_tiny", "model.patch_size=4", "data.image_size=8", "data.batch_size=2"]
IMAGES = [*PICTURES, "data=hub_images", "data.cache_dir=cache", "data.val_fraction=0.4"]
FOLDERS = [*PICTURES, "data=imagefolder", "data.root=photos", "data.num_workers=0"]
NETWORK = ["task=image_classification", "data=digits", "model=huggingface", "model.name=network"]
HERE = "http://127.0.0.1:9/x"
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(ran) (w) file closefile\nshowpage\n"
VIT = {"model_type": "vit", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
VIT |= {"image_size": 8, "patch_size": 4, "num_channels": 1}


@pytest.fixture(autouse=True)
def attempts(tmp_path, monkeypatch):
    """What the test tries to do outside. Nothing is downloaded for want of a network alone, and nothing waits for ever."""
    (tmp_path / "secret.png").write_bytes(picture(tmp_path))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits"))
    signal.alarm(240)
    with watched(tmp_path / "secret.png") as noted:
        yield noted
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    assert noted == []


def picture(folder: Path, colour: str = "red") -> bytes:
    path = folder / "picture.png"
    Image.new("RGB", (8, 8), colour).save(path)
    content = path.read_bytes()
    path.unlink()
    return content


def test_what_is_watched_for_is_noticed(attempts, tmp_path):
    for attempt in (
        lambda: socket.create_connection(("127.0.0.1", 9)),
        lambda: socket.getaddrinfo("localhost", 80),
        lambda: subprocess.run(["true"]),
        lambda: (tmp_path / "secret.png").read_bytes(),
    ):
        with pytest.raises(OSError, match="refused by the test"):
            attempt()
        assert len(attempts) == 1
        attempts.clear()


IMAGE_FILES = {
    "PostScript": lambda path: path.write_bytes(POSTSCRIPT),
    "an enhanced metafile": lambda path: path.write_bytes(b"\x01\x00\x00\x00" + b"\x00" * 36 + b" EMF" + b"\x00" * 100),
    "a bomb": lambda path: Image.new("1", (13_000, 13_000)).save(path, "PNG"),
    "a text": lambda path: path.write_text(HERE),
}
SAID = {"a bomb": "it is larger than data.max_megapixels=89.5"}


@pytest.mark.parametrize("kind", IMAGE_FILES)
def test_no_image_starts_a_program_or_fills_the_memory(holotrain, image_run, kind):
    """Among the files to predict, and to train and test on."""
    write_folder(Path("photos"))
    for path in ("alone.jpg", "photos/train/cat/0.png", "photos/val/dog/0.png"):
        IMAGE_FILES[kind](Path(path))
    said = SAID.get(kind, "it is none of BMP, GIF, JPEG, PNG, PPM, TIFF, WEBP")
    err = holotrain.refused("predict", f"ckpt_path={image_run}", "images=alone.jpg")
    assert "there is no readable image in alone.jpg" in err.splitlines()[-1]
    err = holotrain.refused("fit", *QUICK, *FOLDERS, "trainer.limit_train_batches=1.0")
    assert ("photos/train/cat/0.png" in err or "photos/val/dog/0.png" in err) and said in err
    assert not Path("ran").exists()


NAMES = {
    "an address": HERE,
    "an address within": f"zip://a.png::{HERE}",
    "an address of the Hub": "hf://datasets/nobody/nothing/a.png",
    "a file of the machine": "/etc/hostname",
    "a file of another folder": "../secret.png",
    "a file within another": "zip://a.png::/etc/hostname",
    "a link to another folder": "link.png",
    "a pipe": "pipe.png",
    "nothing": None,
}
"""What a row gives in place of an image."""


def table_of(first: dict, **more) -> pa.Table:
    """Images in which ``first`` comes four times, with labels, as the datasets library would write them."""
    red, blue = ({"bytes": picture(Path("."), colour), "path": None} for colour in ("red", "blue"))
    columns = {"image": [first] * 4 + [red, blue] * 8, "label": ["a", "b"] * 10, **more}
    features = datasets.Features({name: datasets.Value("string") for name in columns} | {"image": datasets.Image()})
    return pa.table(columns, schema=features.arrow_schema)


def write_saved(folder: Path, table: pa.Table, name: str = "data.arrow") -> None:
    """What save_to_disk writes, with the rows in a file of this name."""
    folder.mkdir(exist_ok=True)
    with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    features = datasets.Features.from_arrow_schema(table.schema).to_dict()
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    state = {"_data_files": [{"filename": name}], "_fingerprint": "1", "_format_columns": None, "_format_kwargs": {}}
    state |= {"_format_type": None, "_output_all_columns": False, "_split": None}
    (folder / "state.json").write_text(json.dumps(state))


@pytest.mark.parametrize(("name", "saved"), thinned(NAMES, (False, True), keep=[*zip(NAMES, [False, True] * 5, strict=False)]))
def test_no_row_names_an_image_elsewhere(holotrain, name, saved):
    Path("in").mkdir()
    Path("in/link.png").symlink_to(Path("secret.png").absolute())
    os.mkfifo("in/pipe.png")
    table = table_of({"bytes": None, "path": NAMES[name]})
    write_saved(Path("in"), table) if saved else pq.write_table(table, "in/a.parquet")
    where = "in" if saved else "in/a.parquet"
    err = holotrain.refused("fit", *QUICK, *IMAGES, f"data.name={where}", "trainer.limit_train_batches=1.0")
    assert "holds no readable image (" in err and "is no file in " in err


@pytest.mark.parametrize("streaming", [slow(False), True])
@pytest.mark.parametrize("data", ["hub data.name=in", "hub data.name=in/a.parquet", "text_files data.files=in/*.parquet"])
def test_images_beside_a_text_are_not_looked_at(holotrain, data, streaming):
    Path("in").mkdir()
    pq.write_table(table_of({"bytes": None, "path": HERE}, text=[f"some text {row}" * 9 for row in range(20)]), "in/a.parquet")
    words = [f"data={data.split()[0]}", data.split()[1], f"data.streaming={str(streaming).lower()}", "data.on_error=skip"]
    holotrain.done("fit", *QUICK, *TEXT, *words, *(["data.epoch_batches=2"] if streaming else []))


def saved_elsewhere(folder: Path, name: str) -> None:
    """The rows of a saved data set beside its folder."""
    table = pa.table({"text": [f"some text {row}" * 9 for row in range(20)]})
    write_saved(Path("other"), table)
    write_saved(folder, table)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"_data_files": [{"filename": name}]}))


def saved_with_splits(folder: Path, name: str) -> None:
    saved_elsewhere(folder, "data.arrow")
    shutil.move(folder, "splits")
    folder.mkdir()
    shutil.move("splits", folder / "train")
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", name]}))


def saved_with_link(folder: Path, name: str) -> None:
    saved_elsewhere(folder, "data.arrow")
    (folder / "data.arrow").unlink()
    (folder / "data.arrow").symlink_to(Path(name).absolute())


SAVED = {
    "a file beside its folder": lambda folder: saved_elsewhere(folder, "../other/data.arrow"),
    "a file by its whole path": lambda folder: saved_elsewhere(folder, str(Path("other/data.arrow").absolute())),
    "a file of a server": lambda folder: saved_elsewhere(folder, HERE),
    "no name": lambda folder: saved_elsewhere(folder, None),
    "a split beside its folder": lambda folder: saved_with_splits(folder, "../other"),
    "a split by its whole path": lambda folder: saved_with_splits(folder, str(Path("other").absolute())),
    "a link": lambda folder: saved_with_link(folder, "other/data.arrow"),
    "a device": lambda folder: saved_with_link(folder, "/dev/zero"),
}


@pytest.mark.parametrize("kind", SAVED)
def test_a_saved_data_set_stays_in_its_folder(holotrain, kind):
    SAVED[kind](Path("in"))
    err = holotrain.refused("fit", *QUICK, *TEXT, "data=hub", "data.name=in")
    assert err.startswith("holotrain: data: cannot read in (") and ("is no file in in)" in err or kind == "no name")


CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: {path}
dataset_info:
  features: []
---
"""
CARDS = {"an address": HERE, "the Hub": "hf://datasets/nobody/nothing/a.txt", "a file elsewhere": "../secret.png"}
FILES_OF_CARDS = ("README.md", ".huggingface.yaml", "dataset_infos.json")


@pytest.mark.parametrize(
    ("path", "name", "alone"),
    thinned(CARDS, FILES_OF_CARDS, (False, True), keep=[*zip(CARDS, FILES_OF_CARDS, (False, True, False), strict=True)]),
)
def test_a_folder_is_read_as_it_is_whatever_its_card_says(holotrain, name, path, alone):
    Path("in").mkdir()
    card = CARD.replace("{path}", CARDS[path])
    card = card if name == "README.md" else card.strip("-\n")
    Path("in", name).write_text(json.dumps({"default": {"features": {}}}) if name.endswith("json") else card)
    words = [*QUICK, *TEXT, "data=hub", "data.name=in"]
    if alone:
        assert "data.name: in has no files of .bmp, .csv" in holotrain.refused("fit", *words)
    else:
        Path("in/a.txt").write_text("".join(f"line {number} of some text\n" for number in range(40)))
        holotrain.done("fit", *words)


RESNET = {"model_type": "timm_wrapper", "architecture": "resnet18"}
NETWORKS = {
    "an architecture of the Hub": {"model_type": "timm_wrapper", "architecture": "hf_hub:nobody/nothing"},
    "an architecture in a folder": {"model_type": "timm_wrapper", "architecture": "local-dir:../other"},
    "arguments of timm's": RESNET | {"model_args": {"pretrained_cfg": {"url": HERE}}},
    "a file of weights": RESNET | {"model_args": {"checkpoint_path": "secret.png"}},
    "a backbone": {"model_type": "dpt", "backbone": "nobody/nothing", "use_pretrained_backbone": True},
    "a backbone of a model with a head": VIT | {"backbone": "nobody/nothing"},
    "a model within": VIT | {"vision_config": {"model_type": "timm_wrapper", "architecture": "hf-hub:nobody/nothing"}},
    "kernels": VIT | {"attn_implementation": "kernels-community/nothing"},
    "a backbone by default": {"model_type": "dpt", "is_hybrid": True},
}  # fmt: skip
"""What a config.json may hold."""


REFUSED = re.compile("elsewhere, which is not opened|is not one of eager|has no AutoModelForImageClassification of type dpt")


@pytest.fixture(scope="session")
def of_transformers(tmp_path_factory) -> Path:
    """The checkpoint and the export of a small model of transformers."""

    def make(folder: Path) -> None:
        write_network(folder / "network", VIT)
        fit_in(folder, *QUICK, *NETWORK)
        (folder / "run/checkpoints/last.ckpt").rename(folder / "vit.ckpt")

    return made_once(tmp_path_factory, "of_transformers", make)


def write_network(folder: Path, network: dict) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(network))


@pytest.mark.parametrize("kind", NETWORKS)
def test_no_configuration_of_a_network_leads_elsewhere(holotrain, kind):
    write_network(Path("network"), NETWORKS[kind])
    err = holotrain.refused("fit", *NETWORK, *QUICK)
    assert REFUSED.search(err), err


@pytest.mark.parametrize("kind", NETWORKS)
def test_no_network_in_a_checkpoint_leads_elsewhere(holotrain, of_transformers, kind):
    crafted = torch.load(of_transformers / "vit.ckpt", weights_only=True)
    crafted["holotrain"]["config"]["model"]["config"] = NETWORKS[kind]
    crafted["holotrain"]["description"]["arguments"]["config"] = NETWORKS[kind]
    torch.save(crafted, "crafted.ckpt")
    err = holotrain.refused("test", "ckpt_path=crafted.ckpt")
    assert REFUSED.search(err), err


def index_of_shards(folder: Path, shard: str) -> None:
    names = {name: shard for name in ("vit.layernorm.weight", "classifier.bias")}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def adapter_of_another(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "other", "peft_type": "LORA"}))
    shutil.copy("other/model.safetensors", folder)


def shard_that_is_a_link(folder: Path) -> None:
    (folder / "a.safetensors").symlink_to(Path("other/model.safetensors").absolute())
    index_of_shards(folder, "a.safetensors")


def weights_that_are_a_link(folder: Path) -> None:
    (folder / "model.safetensors").symlink_to(Path("other/model.safetensors").absolute())


FOLDERS_OF_WEIGHTS = {
    "a shard elsewhere": lambda folder: index_of_shards(folder, "../other/model.safetensors"),
    "a shard by its whole path": lambda folder: index_of_shards(folder, str(Path("other/model.safetensors").absolute())),
    "a shard that is a link": shard_that_is_a_link,
    "weights that are a link": weights_that_are_a_link,
    "an adapter of another model": adapter_of_another,
}


@pytest.mark.parametrize("option", ["model.name", slow("model.pretrained")])
@pytest.mark.parametrize("kind", FOLDERS_OF_WEIGHTS)
def test_no_folder_of_weights_leads_elsewhere(holotrain, of_transformers, kind, option):
    run_in(Path("."), "export", f"ckpt_path={of_transformers / 'vit.ckpt'}", "to=other")
    write_network(Path("network"), VIT)
    write_network(Path("crafted"), VIT)
    FOLDERS_OF_WEIGHTS[kind](Path("crafted"))
    err = holotrain.refused("fit", *QUICK, *NETWORK, f"{option}=crafted")
    assert re.search("which is not in the same folder|a link that leads out|crafted holds an adapter of another model", err)


GPT = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 260, "n_positions": 32}
TOKENIZERS = {
    "another model": {"tokenizer_class": "GPT2Tokenizer", "name_or_path": "nobody/nothing", "_commit_hash": None},
    "code": {"auto_map": {"AutoTokenizer": ["nobody/nothing--x.X", None]}},
    "addresses": {"vocab_file": HERE, "merges_file": HERE, "tokenizer_file": HERE},
    "another kind": {"tokenizer_class": "LlamaTokenizer"},
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_no_tokenizer_of_a_model_leads_elsewhere(holotrain, kind):
    """Such a folder has no words of its own, and the tokenizer has none."""
    Path("a.txt").write_text("".join(f"line {number} of some text\n" for number in range(40)))
    write_network(Path("network"), GPT)
    Path("network/tokenizer_config.json").write_text(json.dumps(TOKENIZERS[kind]))
    words = ["model=huggingface", "model.name=network", "data=text_files", "data.files=a.txt"]
    status, _, err = holotrain("fit", *QUICK, *WORDS, *words)
    assert status in (0, 2) and err.count("\n") == 1, err


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("named", [{"vocab": "secret.png"}, {"init_inputs": ["../secret.png"]}, {"gguf_file": "../secret.png"}])
def test_no_tokenizer_of_a_model_names_a_file(holotrain, named, file):
    write_network(Path("network"), GPT)
    Path("network/tokenizer_config.json").write_text("{}")
    Path("network", file).write_text(json.dumps(named))
    words = ["model=huggingface", "model.name=network", "data=text_files", "data.files=a.txt"]
    assert "secret.png', which is not opened" in holotrain.refused("fit", *QUICK, *WORDS, *words)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


SPECIAL = {"a pipe": pipe, "a device": device}
LINES = "".join(f"line {number} of some text\n" for number in range(40))


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.txt", ["data=text_files", "data.files=in/a.txt"]),
        ("a.parquet", ["data=text_files", "data.files=in/*.parquet"]),
        ("a.csv", ["data=hub", "data.name=in/a.csv"]),
        ("a.jsonl", ["data=hub", "data.name=in"]),
        ("a.json", ["data=text_files", "data.files=b.txt", "data.tokenizer=in/a.json"]),
    ],
)
def test_no_special_file_is_waited_for_among_texts(holotrain, kind, name, words):
    Path("in").mkdir()
    Path("b.txt").write_text(LINES)
    SPECIAL[kind](Path("in", name))
    holotrain.refused("fit", *QUICK, *TEXT, *words)


@pytest.mark.parametrize("kind", SPECIAL)
def test_special_files_beside_others_are_passed_over(holotrain, image_run, kind):
    write_folder(Path("photos"))
    for name in ("photos/train/cat/x.png", "photos/val/cat/x.png"):
        SPECIAL[kind](Path(name))
    holotrain.done("fit", *QUICK, *FOLDERS)
    assert holotrain("predict", f"ckpt_path={image_run}", "images=photos")[0] == 0
    for name in ("train.jsonl", "README.md", "dataset_infos.json", "a.txt"):
        SPECIAL[kind](Path("photos", name))
    holotrain.done("fit", *QUICK, *IMAGES, "data.name=photos", "hydra.run.dir=other")
    holotrain.refused("predict", f"ckpt_path={image_run}", "images=photos/a.txt")


@pytest.mark.parametrize("data", ["text_files data.files=in/a.parquet", slow("hub data.name=in/a.parquet"), "hub data.name=in"])
@pytest.mark.parametrize("workers", ["null", slow(2)])
def test_a_small_file_does_not_fill_the_disk(holotrain, monkeypatch, data, workers):
    """A Parquet file repeats a text without end. What the user allows is read."""
    monkeypatch.setattr(limits, "ALWAYS", 2**20)
    Path("in").mkdir()
    pq.write_table(pa.table({"text": [f"{number % 20} {'some text ' * 999}" for number in range(2000)]}), "in/a.parquet")
    assert Path("in/a.parquet").stat().st_size < 20_000
    words = [*QUICK, *TEXT, f"data={data.split()[0]}", data.split()[1], f"data.num_proc={workers}"]
    err = holotrain.refused("fit", *words)
    assert "becomes larger than data.max_expansion=100 times its size" in err
    assert sum(path.stat().st_size for path in Path("cache").rglob("*") if path.is_file()) < 2**22
    skip = ["data.on_error=skip", "data.max_expansion=1e5"] if "hub" not in data else ["data.max_expansion=1e5"]
    holotrain.done("fit", *words, *skip)


def repeated(path: Path, times: int = 1000, **columns) -> None:
    """A Parquet file in which one megabyte of text is repeated, as a row, in a list of one row, or beside other columns."""
    text = pa.DictionaryArray.from_arrays(pa.array([0] * times, pa.int32()), pa.array(["ab" * 500_000]))
    table = pa.table({"text": text, **columns})
    if path.stem == "list":
        table = pa.table({"text": ["a"], "list": pa.ListArray.from_arrays(pa.array([0, times], pa.int32()), text)})
    pq.write_table(table, path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 20_000


LIMITED = pytest.mark.usefixtures("little_memory")


@pytest.fixture
def little_memory(monkeypatch):
    """Reading has 256 MiB, without what Arrow keeps of other tests, and takes no more than that and what the test holds."""
    if sys.platform != "linux":
        pytest.skip("other systems have no such limit")
    monkeypatch.setattr(limits, "ALWAYS", 2**20)
    monkeypatch.setattr(limits, "SPARE", 2**28)
    usual, system = pa.default_memory_pool(), pa.system_memory_pool()
    pa.set_memory_pool(system)
    before = system.max_memory()
    yield
    pa.set_memory_pool(usual)
    assert system.max_memory() <= before + 2**29


@LIMITED
@pytest.mark.parametrize(("name", "streaming"), [("row", "false"), ("row", "true"), ("list", "true")])
def test_a_small_file_does_not_fill_the_memory(holotrain, name, streaming):
    Path("in").mkdir()
    repeated(Path(f"in/{name}.parquet"))
    err = holotrain.refused("fit", *QUICK, *TEXT, "data=hub", "data.name=in", f"data.streaming={streaming}")
    assert "becomes larger than data.max_expansion=100 times its size" in err


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.txt", LINES)


def zipped_after_a_text(path: Path) -> None:
    path.write_text(LINES)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x.txt", LINES)


def archived(path: Path) -> None:
    Path("x.text").write_text(LINES)
    with tarfile.open(path, "w") as archive:
        archive.add("x.text")


ARCHIVES = {
    "zip": zipped,
    "zip after a text": zipped_after_a_text,
    "tar": archived,
    "gzip": lambda path: path.write_bytes(gzip.compress(LINES.encode())),
    "bz2": lambda path: path.write_bytes(bz2.compress(LINES.encode())),
    "xz": lambda path: path.write_bytes(lzma.compress(LINES.encode())),
    "7z": lambda path: path.write_bytes(b"7z\xbc\xaf\x27\x1c" + LINES.encode()),
    "rar": lambda path: path.write_bytes(b"Rar!\x1a\x07\x00" + LINES.encode()),
}


@pytest.mark.parametrize("streaming", ["false", slow("true")])
@pytest.mark.parametrize("kind", ARCHIVES)
def test_no_archive_is_unpacked(holotrain, kind, streaming):
    """Whatever it is called."""
    name = "a.png" if kind == "zip" else "a.txt"
    ARCHIVES[kind](Path(name))
    words = ["data=text_files", f"data.files={name}", f"data.streaming={streaming}"]
    assert f"{name} is compressed; unpack it" in holotrain.refused("fit", *QUICK, *TEXT, *words)


def test_damaged_exif_data_of_a_photograph_do_not_end_a_run(holotrain):
    """A description in place of the height, which Pillow reads and cannot write again."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation], exif[ExifTags.Base.ImageDescription] = 6, "hello"
    Image.new("RGB", (8, 8)).save("a.jpg", exif=exif)
    content = Path("a.jpg").read_bytes()
    crafted = content.replace(b"\x01\x0e\x00\x02", b"\x01\x01\x00\x02")
    assert crafted != content
    pq.write_table(table_of({"bytes": crafted, "path": None}), "a.parquet")
    holotrain.done("fit", *QUICK, *IMAGES, "data.name=a.parquet", "trainer.limit_train_batches=1.0")


@pytest.fixture(scope="session")
def of_text(tmp_path_factory) -> Path:
    """The folder of a finished training on text."""

    def make(folder: Path) -> None:
        (folder / "b.txt").write_text(LINES)
        fit_in(folder, *QUICK, *TEXT, "data=text_files", "data.files=b.txt")

    return made_once(tmp_path_factory, "of_text", make) / "run"


def test_texts_to_predict_are_read_alike(holotrain, of_text, monkeypatch):
    Path("in").mkdir()
    pq.write_table(table_of({"bytes": None, "path": HERE}, text=[f"some text {row}" for row in range(20)]), "in/a.parquet")
    os.mkfifo("in/b.parquet")
    assert holotrain("predict", f"ckpt_path={of_text}", "texts=in")[::2] == (0, "")
    monkeypatch.setattr(limits, "ALWAYS", 2**20)
    pq.write_table(pa.table({"text": ["some text " * 999] * 2000}), "in/c.parquet")
    err = holotrain.refused("predict", f"ckpt_path={of_text}", "texts=in")
    assert err.startswith("holotrain: texts: ") and "becomes larger than data.max_expansion=100 times its size" in err


@pytest.mark.parametrize("option", ["max_megapixels", "max_expansion"])
def test_no_checkpoint_raises_a_limit(holotrain, image_run, of_text, monkeypatch, option):
    folder = image_run if option == "max_megapixels" else of_text
    crafted = torch.load(folder / "checkpoints/last.ckpt", weights_only=True)
    crafted["holotrain"]["config"]["data"][option] = 1e5
    torch.save(crafted, "crafted.ckpt")
    monkeypatch.setattr(limits, "ALWAYS", 2**20)
    IMAGE_FILES["a bomb"](Path("a.png"))
    pq.write_table(pa.table({"text": ["some text " * 999] * 2000}), "a.parquet")
    words = ["predict", "ckpt_path=crafted.ckpt", "images=a.png" if option == "max_megapixels" else "texts=a.parquet"]
    with pytest.warns() if option == "max_megapixels" else nullcontext([]) as warned:
        err = holotrain.refused(*words)
    assert f"larger than data.{option}=" in "".join([err, *(str(each.message) for each in warned)])


def test_no_report_asks_for_what_a_run_names(holotrain, image_run):
    shutil.copytree(image_run, "run")
    Path("run/csv/version_0").mkdir(parents=True)
    Path("run/csv/version_0/metrics.csv").write_text(f"{HERE},step,val/loss\n0.5,1,\n0.25,2,0.125\n")
    Path("run/config.yaml").write_text(f"model: {{name: '{HERE}'}}\n")
    holotrain.done("report", "run")
    holotrain.done("init", "mine")
