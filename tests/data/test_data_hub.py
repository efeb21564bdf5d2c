"""Data sets that the datasets library wrote or reads: text and images, streamed and resumed, and what is refused."""

import json
import os
import pickle
import re
from itertools import chain
from pathlib import Path

import datasets
import pytest
import torch
from data_files import documents_of, write_saved_images
from resumed_loaders import same, stream

from holotrain.data import HubImages, HubText
from holotrain.data.sampler import set_data_shard
from holotrain.data.text import batches
from holotrain.errors import UserError

datasets.disable_progress_bars()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two splits of numbered lines of two classes, as save_to_disk writes them."""
    folder = tmp_path_factory.mktemp("hub") / "saved"
    texts = [f"row {number} " + " ".join(f"{number}.{word}" for word in range(number % 30)) for number in range(600)]
    classes = datasets.Features({"text": datasets.Value("string"), "kind": datasets.ClassLabel(names=["even", "odd"])})
    rows = datasets.Dataset.from_dict({"text": texts, "kind": [number % 2 for number in range(600)]}, classes)
    datasets.DatasetDict({"train": rows.select(range(500)), "held": rows.select(range(500, 600))}).save_to_disk(folder)
    return folder


def text(saved, **options) -> HubText:
    data = HubText(str(saved), **{"cache_dir": str(saved.parent / "cache"), "context": 32, "batch_size": 4} | options)
    data.setup()
    return data


def test_text_that_was_saved_to_disk(saved):
    files = sorted(saved.rglob("*"))
    data = text(saved, val_fraction=0.1, test_fraction=0.1)
    parts = {part: documents_of(data, part) for part in ("train", "val", "test")}
    assert sorted(chain(*parts.values())) == sorted(datasets.load_from_disk(str(saved))["train"]["text"])
    assert all(len(part) > 20 for part in parts.values()) and data.class_names == []
    held = text(saved, val_split="held", test_fraction=0.1, label="kind", layout="documents")
    assert documents_of(held, "val") == datasets.load_from_disk(str(saved))["held"]["text"][:]
    assert held.class_names == ["even", "odd"]
    for written, label in zip(documents_of(held, "train"), held.part("train").labels, strict=True):
        assert int(written.split()[1]) % 2 == label
    assert sorted(saved.rglob("*")) == files


@pytest.mark.parametrize("name", ["a.parquet", "a.tsv", "b.json", "*.json*", "folder"])
def test_files_and_folders_are_read_too(tmp_path, name):
    texts = {kind: [f"{kind}, {number}" for number in range(30)] for kind in "abc"}
    (tmp_path / "folder").mkdir()
    for path in ("a.parquet", "folder/a.parquet"):
        datasets.Dataset.from_dict({"text": texts["a"]}).to_parquet(tmp_path / path)
    (tmp_path / "a.tsv").write_text("n\ttext\n" + "".join(f"1\t{text}\n" for text in texts["a"]))
    (tmp_path / "b.json").write_text(json.dumps([{"text": text} for text in texts["b"]]))
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts["c"]))
    data = HubText(str(tmp_path / name), cache_dir=str(tmp_path / "cache"), val_fraction=0.3, test_fraction=0.3)
    data.setup()
    expected = texts["b"] + texts["c"] if "*" in name else texts["b" if name == "b.json" else "a"]
    assert sorted(chain(*(documents_of(data, part) for part in ("train", "val", "test")))) == sorted(expected)


@pytest.fixture
def small_windows(monkeypatch):
    monkeypatch.setattr(batches, "WINDOW", 4000)
    monkeypatch.setattr(batches, "BATCHES", 1)
    yield
    set_data_shard()


def streamed(saved, **options):
    return text(saved, **{"streaming": True, "epoch_batches": 7, "val_fraction": 0.1, "test_fraction": 0.1} | options)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_resumes_in_mid_epoch_bit_for_bit(saved, small_windows, workers):
    def loader():
        return streamed(saved, num_workers=workers).train_dataloader()

    last = 90 if workers == 0 else 5  # several passes through the text
    begun = last - 30 if workers == 0 else 2
    reference = stream(loader(), range(last))
    assert len(reference) == 7 * last and reference[0]["tokens"].shape == (4, 33)
    for stopped in (0, 3, 7) if workers == 0 else (3,):
        first = loader()
        head = stream(first, range(begun))
        first.set_epoch(begun)
        iterator = iter(first)
        head += [next(iterator) for _ in range(stopped)]
        second = loader()
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))  # plain containers
        assert same(head + stream(second, range(begun + (stopped == 7), last)), reference)
    if workers == 0:
        assert first.state_dict()["stream"]["dataset_state"]["pass"] >= 1


def passes_of(data, workers, node) -> list[list[int]]:
    """The numbers of the rows in the first two passes, in the order in which one of the workers of a process meets them."""
    found: list[list[int]] = [[], []]
    source = data.train_dataloader().batches.dataset
    source.data_shard = (node, 2 * workers)  # as a process with workers divides the rows
    for batch in source:
        if (number := source.state_dict()["pass"]) == 2:
            return found
        found[number] += [int(row) for row in re.findall(r"<(\d+)>", " ".join(map(data.tokenizer.decode, batch["tokens"])))]
    raise AssertionError("a stream has no end")


@pytest.mark.parametrize("workers", [1, 2])
def test_every_row_of_the_training_part_comes_in_each_pass_and_no_other(tmp_path, small_windows, workers):
    """In exactly one process and worker, and in another order than in the pass before."""
    rows = datasets.Dataset.from_dict({"text": [f"<{number}>" * 40 for number in range(400)]})
    rows.save_to_disk(tmp_path / "saved")
    options = {"context": 32, "batch_size": 1, "val_fraction": 0.1, "test_fraction": 0.1}
    whole = text(tmp_path / "saved", **options)
    expected = {int(re.match(r"<(\d+)>", written)[1]) for written in documents_of(whole, "train")}
    assert 250 < len(expected) < 400
    shares = [passes_of(streamed(tmp_path / "saved", **options), workers, node) for node in range(2 * workers)]
    for number in (0, 1):
        met = [set(share[number]) for share in shares]
        assert set().union(*met) == expected and sum(map(len, met)) == len(expected)
    for first, second in shares:
        assert list(dict.fromkeys(first)) != list(dict.fromkeys(second))


def test_a_stream_continues_with_as_many_workers_only(saved, small_windows):
    first, second = streamed(saved).train_dataloader(), streamed(saved, num_workers=2).train_dataloader()
    next(iter(first))
    with pytest.raises(UserError, match="as many workers as before, 0, not 2"):
        second.load_state_dict(first.state_dict())
    with pytest.raises(UserError, match="position is that of a stream"):
        text(saved).train_dataloader().load_state_dict(first.state_dict())
    with pytest.raises(UserError, match="position is not that of a stream"):
        second.load_state_dict(text(saved).train_dataloader().state_dict())


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_saved_images(tmp_path_factory.mktemp("images") / "saved")


def pictures(images, **options) -> HubImages:
    options = {"cache_dir": str(images.parent / "cache"), "image_size": 16, "batch_size": 4} | options
    data = HubImages(str(images), **options)
    data.prepare_data()
    data.setup()
    return data


def test_images_that_were_saved_to_disk(images):
    data = pictures(images, augment=False, val_fraction=0.2)
    assert data.class_names == ["a", "b", "c"] and data.num_classes == 3
    assert [len(data.split(part)) for part in ("train", "val", "test")] == [48, 12, 12]
    shown, labels = zip(*(batch for batch in data.val_dataloader()), strict=True)
    assert shown[0].shape == (4, 3, 16, 16) and shown[0].dtype == torch.float32
    for part in ("train", "val"):
        for index in range(len(data.split(part))):
            image, label = data.split(part)[index]
            assert image.getpixel((0, 0))[2] == label
    two = pictures(images, classes=["c", "a"])
    assert two.class_names == ["c", "a"] and {label for _, label in (two.split("train")[i] for i in range(30))} == {0, 1}


REFUSED = [
    (HubText, {"text": "txt"}, r"data\.text: the rows of .*saved have no column 'txt'; they have text, kind"),
    (HubText, {"text": "kind"}, r"data\.text: column 'kind' holds no text, but ClassLabel"),
    (HubText, {"split": "hold"}, r"data\.split: 'hold' is not one of held, train"),
    (HubText, {"config": "small"}, r"data\.config: .*saved has no configurations; only the Hub"),
    (HubText, {"name": "nobody/nothing"}, r"data: cannot read nobody/nothing"),
    (HubText, {"streaming": True, "context": 10**6}, r"data\.batch_size: some process or worker has less than a batch"),
    (HubImages, {"image": "text"}, r"data\.image: column 'text' holds no images"),
]


@pytest.mark.parametrize(("kind", "options", "message"), REFUSED)
def test_mistakes_are_said_in_one_line(saved, tmp_path, monkeypatch, kind, options, message):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    data = kind(**{"name": str(saved), "cache_dir": str(tmp_path)} | options)
    with pytest.raises(UserError, match=message) as error:
        data.setup()
        next(iter(data.train_dataloader()))
    assert "\n" not in str(error.value)


class Payload:
    def __reduce__(self):
        return os.system, ("touch ran",)


@pytest.mark.parametrize("name", ["crafted", "crafted/a.pickle"])
def test_no_code_of_a_data_set_runs(tmp_path, monkeypatch, name):
    """A loading script, and pickles among the files."""
    monkeypatch.chdir(tmp_path)
    Path("crafted").mkdir()
    Path("crafted/crafted.py").write_text("import os\nos.system('touch ran')\n")
    Path("crafted/a.pickle").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(UserError):
        HubText(name, cache_dir="cache").setup()
    assert not Path("ran").exists()
