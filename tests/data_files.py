"""Small data sets in the files of their true formats, and the documents that are read from such."""

import hashlib
import pickle
import shutil
import struct
import sysconfig
from itertools import pairwise
from pathlib import Path

import numpy as np
from PIL import Image
from torchvision import datasets


def write_mnist(root, count=40):
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for part in ("train", "t10k"):
        images = np.arange(count * 28 * 28, dtype=np.uint32).astype(np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, count, 28, 28) + images.tobytes())
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, count) + labels.tobytes())


def write_cifar(root, kind, monkeypatch, per_file=20):
    source = {10: datasets.CIFAR10, 100: datasets.CIFAR100}[kind]
    folder = root / source.base_folder
    folder.mkdir(parents=True)
    names = [f"c{index}" for index in range(kind)]
    label_key = {10: "labels", 100: "fine_labels"}[kind]

    def write(name, content):
        (folder / name).write_bytes(pickle.dumps(content))
        return [name, hashlib.md5((folder / name).read_bytes()).hexdigest()]

    def batch(seed):
        pixels = np.random.default_rng(seed).integers(0, 256, (per_file, 3072), dtype=np.uint8)
        return {"data": pixels, label_key: [index % kind for index in range(per_file)]}

    listed = {"train_list": [write(name, batch(1)) for name, _ in source.train_list]}
    listed["test_list"] = [write(name, batch(2)) for name, _ in source.test_list]
    entry = write(source.meta["filename"], {source.meta["key"]: names})
    listed["meta"] = {"filename": entry[0], "key": source.meta["key"], "md5": entry[1]}
    for name, value in listed.items():
        monkeypatch.setattr(source, name, value)
    return folder


def write_saved_images(folder):
    """Sixty small images of three classes, as save_to_disk writes them; the red of each is its number, every other one is half
    transparent."""
    from datasets import ClassLabel, Dataset, Features
    from datasets import Image as Column

    pictures = [Image.new("RGBA", (20 + n % 5, 18), (n * 4, 9, n % 3, 255 - n % 2 * 128)) for n in range(60)]
    features = Features({"image": Column(), "label": ClassLabel(names=["a", "b", "c"])})
    Dataset.from_dict({"image": pictures, "label": [n % 3 for n in range(60)]}, features).save_to_disk(folder)
    return folder


def write_folder(root, parts=("train", "val"), classes=("cat", "dog"), each=6, size=40):
    rng = np.random.default_rng(0)
    for part in parts:
        for name in classes:
            folder = root / part / name
            folder.mkdir(parents=True)
            for index in range(each):
                pixels = rng.integers(0, 256, (size + index, size, 3), dtype=np.uint8)
                image = Image.fromarray(pixels if index % 2 else pixels[..., 0])
                image.save(folder / f"{index}.{'jpg' if index % 2 else 'png'}")
    return root


def write_letters(folder: Path, shift: int = 0) -> None:
    """Four texts of letters that a formula draws; of another ``shift`` they are others."""
    folder.mkdir(parents=True)
    for number in range(4):
        text = "".join(chr(97 + (i * i * (number + 3 + shift) + i // 7) % 26) for i in range(6000))
        (folder / f"{number}.txt").write_text(text)


PACKAGES = ("json", "email", "html", "logging", "urllib", "http", "xml", "unittest", "concurrent", "sqlite3")


def copy_of_the_standard_library(folder: Path) -> None:
    """A few packages of it."""
    for name in PACKAGES:
        shutil.copytree(Path(sysconfig.get_path("stdlib")) / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))


def documents_of(data, part) -> list[str]:
    """The documents of a part of a text data module."""
    corpus = data.part(part)
    return [data.tokenizer.decode(corpus.tokens[first:last]) for first, last in pairwise(corpus.offsets.tolist())]
