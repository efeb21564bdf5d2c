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
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from covering import slow
from data_files import write_folder
from made_once import made_once
from PIL import ExifTags, Image
from small_run import SMALL, fit_in, run_in
from watched import watched

from holotrain.data import HubImages, HubText, ImageFolder, TextFiles, limits
from holotrain.data.image_folder import image_files
from holotrain.data.images import IMAGENET
from holotrain.data.text.sources import text_files
from holotrain.data.tokenizers import ByteTokenizer
from holotrain.errors import UserError

SIZES = [word for word in SMALL if word.startswith("model.")]
QUICK = [word for word in SMALL if word not in SIZES]
QUICK += ["trainer.max_epochs=1", "logger=none", "callbacks.progress=null", "test=false", "hydra.run.dir=run"]
WORDS = [
    "task=causal_lm",
    "data=text_files",
    "data.files=a.txt",
    "data.context=16",
    "data.batch_size=2",
    "data.cache_dir=cache",
]
WORDS += ["data.val_fraction=0.2", "data.test_fraction=0.2", "data.unit=line"]
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
    "an enhanced metafile": lambda path: path.write_bytes(b"\x01\x00\x00\x00" + b"\x00" * 36 + b" EMF" + b"\x00" * 100),
    "a bomb": lambda path: Image.new("1", (13_000, 13_000)).save(path, "PNG"),
    "a text": lambda path: path.write_text(HERE),
}


@pytest.mark.parametrize("kind", IMAGE_FILES)
def test_no_image_starts_a_program_or_fills_the_memory(kind):
    """In a folder, in a row, and among the files to predict."""
    write_folder(Path("photos"))
    IMAGE_FILES[kind](Path("photos/val/dog/0.png"))
    shutil.copy("photos/val/dog/0.png", "a.jpg")
    pq.write_table(table_of({"bytes": Path("a.jpg").read_bytes(), "path": "a.jpg"}), "a.parquet")
    reason = "it is larger than data.max_megapixels=89.5" if kind == "a bomb" else "it is none of BMP, GIF, JPEG, PNG"
    refused(ImageFolder("photos", image_size=8, batch_size=2), f"photos/val/dog/0.png is not a readable image .*{reason}")
    refused(images("a.parquet"), rf"row \d+ holds no readable image \({reason}")
    with pytest.warns(UserWarning, match=reason):
        ((_, paths),) = image_files(Path("a.jpg"), 3, 8, IMAGENET, batch_size=2)
    assert list(paths) == [""] and not Path("ran").exists()


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
    red, blue = ({"bytes": picture(colour), "path": None} for colour in ("red", "blue"))
    columns = {"image": [first] * 4 + [red, blue] * 8, "label": ["a", "b"] * 10, **more}
    features = datasets.Features({name: datasets.Value("string") for name in columns} | {"image": datasets.Image()})
    return pa.table(columns, schema=features.arrow_schema)


def write_saved(folder: Path, table: pa.Table, name: str | None = "data.arrow") -> None:
    """What save_to_disk writes, with the name of the file of rows."""
    folder.mkdir(exist_ok=True)
    with pa.OSFile(str(folder / "data.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    features = datasets.Features.from_arrow_schema(table.schema).to_dict()
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    state = {"_data_files": [{"filename": name}], "_fingerprint": "1", "_format_columns": None, "_format_kwargs": {}}
    state |= {"_format_type": None, "_output_all_columns": False, "_split": None}
    (folder / "state.json").write_text(json.dumps(state))


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_no_row_names_an_image_elsewhere(name, saved):
    Path("in").mkdir()
    Path("in/link.png").symlink_to(Path("secret.png").absolute())
    os.mkfifo("in/pipe.png")
    table = table_of({"bytes": None, "path": NAMES[name]})
    write_saved(Path("in"), table) if saved else pq.write_table(table, "in/a.parquet")
    refused(images("in" if saved else "in/a.parquet"), r"holds no readable image \(.*is no file in ")


def test_rows_may_name_images_below_their_folder():
    Path("in/more").mkdir(parents=True)
    Path("in/more/a.png").write_bytes(picture())
    pq.write_table(table_of({"bytes": None, "path": "more/a.png"}), "in/a.parquet")
    read(images("in/a.parquet"))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("kind", "name"), [(HubText, "in"), (HubText, "in/a.parquet"), (TextFiles, "in/*.parquet")])
def test_images_beside_a_text_are_not_looked_at(kind, name, streaming):
    Path("in").mkdir()
    pq.write_table(table_of({"bytes": None, "path": HERE}, text=[f"some text {row}" * 9 for row in range(20)]), "in/a.parquet")
    read(text(kind, name, streaming=streaming, on_error="skip"))


ROWS = pa.table({"text": [f"some text {row}" * 9 for row in range(20)]})
FILES = {"beside": "../other/data.arrow", "by its path": "{}/other/data.arrow", "of a server": HERE, "none": None}
SPLITS = {"a split beside": "../other", "a split by its path": "{}/other"}
LINKS = {"a link": "other/data.arrow", "a device": "/dev/zero"}


@pytest.mark.parametrize("kind", [*FILES, *SPLITS, *LINKS])
def test_a_saved_data_set_stays_in_its_folder(kind):
    write_saved(Path("other"), ROWS)
    name = (FILES | SPLITS).get(kind, "data.arrow")
    name = name and name.format(Path.cwd())
    Path("in").mkdir()
    if kind in SPLITS:
        write_saved(Path("in/train"), ROWS)
        Path("in/dataset_dict.json").write_text(json.dumps({"splits": ["train", name]}))
    else:
        write_saved(Path("in"), ROWS, name)
    if kind in LINKS:
        Path("in/data.arrow").unlink()
        Path("in/data.arrow").symlink_to(Path(LINKS[kind]).absolute())
    refused(text(HubText, "in"), r"^data: cannot read in \(" + ("" if kind == "none" else ".*is no file in in"))


CARD = "configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: {}\ndataset_info:\n  features: []\n"


@pytest.mark.parametrize("path", [HERE, "hf://datasets/nobody/nothing/a.txt", "../secret.png"])
def test_a_folder_is_read_as_it_is_whatever_its_card_says(path):
    Path("in").mkdir()
    Path("in/README.md").write_text(f"---\n{CARD.format(path)}---\n")
    Path("in/.huggingface.yaml").write_text(CARD.format(path))
    Path("in/dataset_infos.json").write_text(json.dumps({"default": {"features": {}}}))
    refused(text(HubText, "in"), r"^data\.name: in has no files of \.bmp, \.csv")
    Path("in/a.txt").write_text(LINES)
    read(text(HubText, "in"))


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
        run_in(folder, "export", "ckpt_path=vit.ckpt", "to=export")

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


def shard_that_is_a_link(folder: Path) -> None:
    (folder / "a.safetensors").symlink_to(Path("other/model.safetensors").absolute())
    index_of_shards(folder, "a.safetensors")


def adapter_of_another(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "other", "peft_type": "LORA"}))
    shutil.copy("other/model.safetensors", folder)


WEIGHTS = Path("other/model.safetensors")
FOLDERS_OF_WEIGHTS = {
    "a shard elsewhere": lambda folder: index_of_shards(folder, "../other/model.safetensors"),
    "a shard by its whole path": lambda folder: index_of_shards(folder, str(WEIGHTS.absolute())),
    "a shard that is a link": shard_that_is_a_link,
    "weights that are a link": lambda folder: (folder / "model.safetensors").symlink_to(WEIGHTS.absolute()),
    "an adapter of another model": adapter_of_another,
}


@pytest.mark.parametrize("option", ["model.name", slow("model.pretrained")])
@pytest.mark.parametrize("kind", FOLDERS_OF_WEIGHTS)
def test_no_folder_of_weights_leads_elsewhere(holotrain, of_transformers, kind, option):
    shutil.copytree(of_transformers / "export", "other")
    write_network(Path("network"), VIT)
    write_network(Path("crafted"), VIT)
    FOLDERS_OF_WEIGHTS[kind](Path("crafted"))
    err = holotrain.refused("fit", *QUICK, *NETWORK, f"{option}=crafted")
    assert re.search("which is not in the same folder|a link that leads out|crafted holds an adapter of another model", err)


@pytest.mark.parametrize("option", ["model.name", "model.pretrained"])
def test_a_configuration_does_not_choose_the_weights(holotrain, of_transformers, option):
    """``from_pretrained`` would read those that it names."""
    shutil.copytree(of_transformers / "export", "crafted")
    write_network(Path("network"), VIT)
    write_network(Path("crafted"), VIT | {"transformers_weights": "evil.safetensors"})
    Path("crafted/evil.safetensors").symlink_to("/dev/zero")
    status, _, err = holotrain("fit", *QUICK, *NETWORK, f"{option}=crafted")
    assert (status, err) == (0, "24 tensors of crafted\n")


GPT = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 260, "n_positions": 32}
TOKENIZERS = {
    "another model": {"tokenizer_class": "GPT2Tokenizer", "name_or_path": "nobody/nothing", "_commit_hash": None},
    "code": {"auto_map": {"AutoTokenizer": ["nobody/nothing--x.X", None]}},
    "addresses": {"vocab_file": HERE, "merges_file": HERE, "tokenizer_file": HERE},
    "another kind": {"tokenizer_class": "LlamaTokenizer"},
}


@pytest.fixture
def gpt(holotrain):
    """``fit`` of a model in the folder ``network``."""
    Path("a.txt").write_text(LINES)
    write_network(Path("network"), GPT)
    return ["fit", *QUICK, *WORDS, "model=huggingface", "model.name=network"]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_no_tokenizer_of_a_model_leads_elsewhere(holotrain, gpt, kind):
    """Such a folder has no words of its own, and the tokenizer has none."""
    Path("network/tokenizer_config.json").write_text(json.dumps(TOKENIZERS[kind]))
    status, _, err = holotrain(*gpt)
    assert status in (0, 2) and err.count("\n") == 1, err


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("named", [{"vocab": "secret.png"}, {"init_inputs": ["../secret.png"]}, {"gguf_file": "../secret.png"}])
def test_no_tokenizer_of_a_model_names_a_file(holotrain, gpt, named, file):
    Path("network/tokenizer_config.json").write_text("{}")
    Path("network", file).write_text(json.dumps(named))
    assert "secret.png', which is not opened" in holotrain.refused(*gpt)


SPECIAL = {"a pipe": os.mkfifo, "a device": lambda path: path.symlink_to("/dev/zero")}


@pytest.mark.parametrize("kind", ["a pipe", slow("a device")])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "vocab.json", "config.json", "model.safetensors"])
def test_no_special_file_is_waited_for_in_the_folder_of_a_model(holotrain, gpt, kind, name):
    Path("network", name).unlink(missing_ok=True)
    SPECIAL[kind](Path("network", name))
    status, _, err = holotrain(*gpt)
    assert status == (2 if name == "config.json" else 0) and err.count("\n") <= 1, err


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize(
    ("file", "kind", "name"),
    [
        ("a.txt", TextFiles, "in/a.txt"),
        ("a.parquet", TextFiles, "in/*.parquet"),
        ("a.csv", HubText, "in/a.csv"),
        ("a.jsonl", HubText, "in"),
        *((file, HubText, "in") for file in ("dataset_info.json", "state.json", "data.arrow")),
    ],
)
def test_no_special_file_is_waited_for_among_texts(special, file, kind, name):
    if file.startswith(("data", "state")):
        write_saved(Path("in"), ROWS)
    Path("in").mkdir(exist_ok=True)
    Path("in", file).unlink(missing_ok=True)
    SPECIAL[special](Path("in", file))
    refused(text(kind, name), "^data")
    with pytest.raises(UserError, match=r"data\.tokenizer: cannot read"):
        TextFiles("b.txt", tokenizer=f"in/{file}")


@pytest.mark.parametrize("kind", SPECIAL)
def test_special_files_beside_others_are_passed_over(kind):
    write_folder(Path("photos"))
    for name in ("photos/train/cat/x.png", "photos/val/cat/x.png"):
        SPECIAL[kind](Path(name))
    read(ImageFolder("photos", image_size=8, batch_size=2))
    assert len(image_files(Path("photos"), 3, 8, IMAGENET, batch_size=1)) == 24
    for name in ("train.jsonl", "README.md", "dataset_infos.json", "a.txt"):
        SPECIAL[kind](Path("photos", name))
    read(images("photos"))


TOO_LARGE = "becomes larger than data.max_expansion=100 times its size"


@pytest.mark.parametrize(("kind", "name"), [(TextFiles, "in/a.parquet"), (HubText, "in/a.parquet"), (HubText, "in")])
@pytest.mark.parametrize("workers", [None, slow(2)])
def test_a_small_file_does_not_fill_the_disk(monkeypatch, kind, name, workers):
    """A Parquet file repeats a text without end. What the user allows is read."""
    monkeypatch.setattr(limits, "ALWAYS", 2**20)
    Path("in").mkdir()
    pq.write_table(pa.table({"text": [f"{number % 20} {'some text ' * 999}" for number in range(2000)]}), "in/a.parquet")
    assert Path("in/a.parquet").stat().st_size < 20_000
    refused(text(kind, name, num_proc=workers), TOO_LARGE)
    assert sum(path.stat().st_size for path in Path("cache").rglob("*") if path.is_file()) < 2**22
    text(kind, name, num_proc=workers, on_error="skip", max_expansion=1e5).prepare_data()


def repeated(path: Path, times: int = 1000, **columns) -> None:
    """A Parquet file in which one megabyte of text is repeated, as a row, in a list of one row, or beside other columns."""
    text = pa.DictionaryArray.from_arrays(pa.array([0] * times, pa.int32()), pa.array(["ab" * 500_000]))
    table = pa.table({"text": text, **columns})
    if path.stem == "list":
        table = pa.table({"text": ["a"], "list": pa.ListArray.from_arrays(pa.array([0, times], pa.int32()), text)})
    pq.write_table(table, path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 20_000


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


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(("name", "streaming"), [("row", False), ("row", True), ("list", True), ("metadata", False)])
def test_a_small_file_does_not_fill_the_memory(name, streaming):
    Path("in").mkdir()
    if name != "metadata":
        repeated(Path(f"in/{name}.parquet"))
        return refused(text(HubText, "in", streaming=streaming), TOO_LARGE)
    for number in range(4):
        Path(f"in/{number}.png").write_bytes(picture())
    repeated(Path("in/metadata.parquet"), file_name=[f"{row % 4}.png" for row in range(1000)], label=["a", "b"] * 500)
    refused(images("in"), TOO_LARGE)


@pytest.mark.usefixtures("little_memory")
def test_a_saved_data_set_does_not_fill_the_memory():
    table = pa.table({"text": ["a" * 1_000_000] * 100})
    write_saved(Path("in"), table)
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.OSFile("in/data.arrow", "wb") as file, pa.ipc.new_stream(file, table.schema, options=options) as stream:
        for _ in range(10):
            stream.write_table(table)
    refused(text(HubText, "in"), r"data: cannot read in \(it needs too much memory\)")


def zipped(path: Path) -> None:
    """After what is in the file."""
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x.txt", LINES)


def zipped_in_parts(path: Path) -> None:
    zipped(path)
    path.write_bytes(b"PK\x07\x08" + path.read_bytes())


def archived(path: Path) -> None:
    Path("x.text").write_text(LINES)
    with tarfile.open(path, "w") as archive:
        archive.add("x.text")


ARCHIVES = {
    "zip": zipped,
    "zip after a text": lambda path: path.write_text(LINES) and zipped(path),
    "zip in parts": zipped_in_parts,
    "tar": archived,
    "gzip": lambda path: path.write_bytes(gzip.compress(LINES.encode())),
    "bz2": lambda path: path.write_bytes(bz2.compress(LINES.encode())),
    "xz": lambda path: path.write_bytes(lzma.compress(LINES.encode())),
    "7z": lambda path: path.write_bytes(b"7z\xbc\xaf\x27\x1c" + LINES.encode()),
    "rar": lambda path: path.write_bytes(b"Rar!\x1a\x07\x00" + LINES.encode()),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ARCHIVES)
def test_no_archive_is_unpacked(kind, streaming):
    """Whatever it is called."""
    name = "a.png" if kind == "zip" else "a.txt"
    ARCHIVES[kind](Path(name))
    refused(text(TextFiles, name, streaming=streaming), f"{name} is compressed; unpack it")


@pytest.mark.parametrize("ending", ["zip", "gz", "bz2", "xz", "tar", "zst"])
def test_a_text_that_is_called_an_archive_is_read_or_refused(ending):
    Path(f"a.{ending}").write_text(LINES)
    try:
        read(text(TextFiles, f"a.{ending}", streaming=True))
    except UserError as error:
        assert f"a.{ending}" in str(error)


def test_damaged_exif_data_of_a_photograph_do_not_end_a_run():
    """A description in place of the height, which Pillow reads and cannot write again."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation], exif[ExifTags.Base.ImageDescription] = 6, "hello"
    Image.new("RGB", (8, 8)).save("a.jpg", exif=exif)
    content = Path("a.jpg").read_bytes()
    crafted = content.replace(b"\x01\x0e\x00\x02", b"\x01\x01\x00\x02")
    assert crafted != content
    pq.write_table(table_of({"bytes": crafted, "path": None}), "a.parquet")
    read(images("a.parquet"))


def test_texts_to_predict_are_read_alike(monkeypatch):
    def texts() -> list[str]:
        loader = text_files(Path("in"), ByteTokenizer(), 16, packed=False, batch_size=2)
        return [name for batch in loader for name in batch["names"]]

    Path("in").mkdir()
    pq.write_table(table_of({"bytes": None, "path": HERE}, text=[f"some text {row}" for row in range(20)]), "in/a.parquet")
    os.mkfifo("in/b.parquet")
    assert len(texts()) == 20
    monkeypatch.setattr(limits, "ALWAYS", 2**20)
    pq.write_table(pa.table({"text": ["some text " * 999] * 2000}), "in/c.parquet")
    with pytest.raises(UserError, match=f"^texts: .*{TOO_LARGE}"):
        texts()


@pytest.fixture(scope="session")
def of_text(tmp_path_factory) -> Path:
    """The folder of a finished training on text."""

    def make(folder: Path) -> None:
        (folder / "a.txt").write_text(LINES)
        fit_in(folder, *QUICK, *SIZES, *WORDS)

    return made_once(tmp_path_factory, "of_text", make) / "run"


def test_no_checkpoint_raises_a_limit(holotrain, image_run, of_text, monkeypatch):
    monkeypatch.setattr(limits, "ALWAYS", 2**20)
    IMAGE_FILES["a bomb"](Path("a.png"))
    pq.write_table(pa.table({"text": ["some text " * 999] * 2000}), "a.parquet")
    with pytest.warns(UserWarning, match="larger than data.max_megapixels=89.5"):
        for folder, option, files in (
            (image_run, "max_megapixels", "images=a.png"),
            (of_text, "max_expansion", "texts=a.parquet"),
        ):
            crafted = torch.load(folder / "checkpoints/last.ckpt", weights_only=True)
            crafted["holotrain"]["config"]["data"][option] = 1e5
            torch.save(crafted, "crafted.ckpt")
            err = holotrain.refused("predict", "ckpt_path=crafted.ckpt", files)
            assert TOO_LARGE in err or "there is no readable image in a.png" in err


@pytest.mark.parametrize("command", ["predict", "plan", "export to=out", "generate prompt=a"])
def test_no_command_goes_outside_by_itself(holotrain, image_run, of_text, command):
    run = of_text if command.startswith("generate") else image_run
    found = holotrain(*command.split(), f"ckpt_path={run}")
    assert found[0] == 0, found


def test_no_report_asks_for_what_a_run_names(holotrain, image_run):
    shutil.copytree(image_run, "run")
    Path("run/csv/version_0").mkdir(parents=True)
    Path("run/csv/version_0/metrics.csv").write_text(f"{HERE},step,val/loss\n0.5,1,\n0.25,2,0.125\n")
    Path("run/config.yaml").write_text(f"model: {{name: '{HERE}'}}\n")
    holotrain.done("report", "run")
    holotrain.done("init", "mine")
