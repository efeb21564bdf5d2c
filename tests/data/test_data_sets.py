"""Each data set, read from files in its true format that the tests write; and arguments that none can be made from."""

import json
import multiprocessing
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from compared import assert_close
from data_files import write_cifar, write_folder, write_mnist
from PIL import Image
from torch.utils.data import Subset

from holotrain.data import CIFAR10, CIFAR100, MNIST, Digits, Fake, ImageFolder, StdlibText, TextFiles
from holotrain.data.image_files import image_files
from holotrain.data.images import statistics_of
from holotrain.errors import UserError


def one_line(error) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def ready(data):
    data.prepare_data()
    data.setup()
    return data


def test_digits_are_split_the_same_for_every_seed_and_augmented_in_training_alone():
    parts = {}
    for seed in (0, 7):
        data = ready(Digits(seed=seed))
        parts[seed] = {name: [image.numpy().tobytes() for image, _ in data.split(name)] for name in ("train", "val", "test")}
        labels = torch.cat([labels for _, labels in data.test_dataloader()])
        counts = labels.bincount()
        assert abs(len(labels) - 1797 / 5) <= 5
        assert counts.max() - counts.min() <= 3
    assert parts[0] == parts[7]
    assert sum(map(len, parts[0].values())) == 1797
    data, plain = ready(Digits(batch_size=2000)), ready(Digits(batch_size=2000, augment=False))
    (tests, _), *_ = data.test_dataloader()
    assert tests.dtype == torch.float32 and abs(tests.mean()) < 0.05 and abs(tests.std() - 1) < 0.05
    assert not torch.equal(next(iter(data.train_dataloader()))[0], next(iter(plain.train_dataloader()))[0])


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    data, expected = ready(Digits()), load_digits()
    pixels = [(image.flatten().tolist(), label) for part in ("train", "val", "test") for image, label in data.split(part)]
    theirs = np.round(expected.images * (255 / 16)).reshape(-1, 64).tolist()
    assert sorted((p, int(label)) for p, label in pixels) == sorted(zip(theirs, expected.target.tolist(), strict=True))
    assert data.class_names == [str(name) for name in expected.target_names]


@pytest.mark.slow
def test_a_training_on_digits_imports_neither_scikit_learn_nor_the_library_of_data_sets(tmp_path):
    words = ["fit", "trainer.max_steps=1", "test=false", f"hydra.run.dir={tmp_path}/run"]
    said = f"import sys; from holotrain.cli import main; print(main({words}), *{{'sklearn', 'datasets'}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0", done.stderr


def test_mnist_from_idx_files(tmp_path):
    write_mnist(tmp_path)
    data = ready(MNIST(root=str(tmp_path), batch_size=8, val_fraction=0.25, download=False))
    assert [len(data.split(name)) for name in ("train", "val", "test")] == [30, 10, 40]
    assert data.class_names == [*"0123456789"]
    images, labels = next(iter(data.test_dataloader()))
    assert images.shape == (8, 1, 28, 28) and labels.tolist() == list(range(8))
    raw = (np.arange(28 * 28) % 256).reshape(28, 28) / 255
    assert_close(images[0, 0], torch.tensor((raw - 0.1307) / 0.3081, dtype=torch.float32), atol=1e-5)


@pytest.mark.parametrize(("kind", "module", "files"), [(10, CIFAR10, 5), (100, CIFAR100, 1)])
def test_cifar_from_its_batches(tmp_path, monkeypatch, kind, module, files):
    folder = write_cifar(tmp_path, kind, monkeypatch)
    data = ready(module(root=str(tmp_path), batch_size=4, val_fraction=0.0, mixup_alpha=0.2, randaugment_ops=2))
    assert len(data.split("train")) == 20 * files and len(data.split("test")) == 20
    images, labels = next(iter(data.train_dataloader()))
    assert images.shape == (4, 3, 32, 32) and labels.max() < kind
    assert len(data.class_names) == kind
    archive = next(iter(folder.glob("*test*")))
    archive.write_bytes(archive.read_bytes()[:100])
    with pytest.raises(UserError) as error:
        ready(module(root=str(tmp_path), download=False))
    assert str(tmp_path) in one_line(error)


@pytest.mark.parametrize("module", [MNIST, CIFAR10])
@pytest.mark.parametrize(("download", "problem"), [(False, "are missing or damaged"), (True, "could not be downloaded")])
def test_missing_files_are_asked_for_in_one_line(tmp_path, monkeypatch, module, download, problem):
    monkeypatch.setattr("urllib.request.urlopen", Mock(side_effect=OSError("no network")))
    with pytest.raises(UserError, match=f"{problem}.*; put .* into {tmp_path}") as error:
        ready(module(root=str(tmp_path), download=download))
    one_line(error)


@pytest.mark.parametrize("size", [32, 96])
def test_imagefolder_evaluates_the_middle_of_the_image(tmp_path, size):
    """Against Pillow's own resizing of the same file."""
    data = ready(ImageFolder(str(write_folder(tmp_path, each=1, size=200)), image_size=size, batch_size=2))
    images, _ = next(iter(data.val_dataloader()))
    side = size if size <= 64 else size * 8 // 7
    image = Image.open(tmp_path / "val" / "cat" / "0.png").convert("RGB").resize((side, side), Image.Resampling.BILINEAR)
    edge = round((side - size) / 2)
    expected = torch.tensor(np.asarray(image.crop((edge, edge, edge + size, edge + size)))).permute(2, 0, 1) / 255
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in data.statistics)
    assert_close(images[0] * std + mean, expected, atol=2.5 / 255)


MODES = {
    "RGBA": ("png", (200, 10, 30, 128), (200, 10, 30)),
    "P": ("png", 1, (200, 10, 30)),
    "1": ("png", 1, (255, 255, 255)),
    "I;16": ("png", 257 * 90, (90, 90, 90)),
    "CMYK": ("tiff", (55, 245, 225, 0), (200, 10, 30)),
}
"""Images of one colour: the form of their file, the colour as their mode has it, and as RGB."""


@pytest.mark.parametrize("mode", MODES)
def test_images_of_every_kind_have_their_colours(tmp_path, mode):
    form, colour, rgb = MODES[mode]
    image = Image.new(mode, (40, 40), colour)
    transparent = {}
    if mode == "P":
        image.putpalette([0, 0, 0, *rgb])
        transparent = {"transparency": b"\0\x80"}
    for part, kind in (("train", "cat"), ("train", "dog"), ("val", "cat"), ("val", "dog")):
        (tmp_path / part / kind).mkdir(parents=True)
        image.save(tmp_path / part / kind / f"0.{form}", **transparent)
    data = ready(ImageFolder(str(tmp_path), image_size=32, batch_size=2))
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in data.statistics)
    expected = torch.tensor(rgb).view(3, 1, 1).expand(3, 32, 32) / 255
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        images, _ = next(iter(data.val_dataloader()))
        predicted, _ = next(iter(data.predict_dataloader()))
        files, _ = next(iter(image_files(tmp_path / "val", 3, 32, data.statistics, batch_size=2)))
        trained, _ = next(iter(data.train_dataloader()))
    for batch in (images, predicted, files):
        assert_close(batch[0] * std + mean, expected, atol=2 / 255)
    seen = trained[0] * std + mean
    assert_close(seen[:, 12:20, 12:20], expected[:, 12:20, 12:20], atol=2 / 255)  # the edge may be padded


@pytest.fixture
def damaged(tmp_path):
    """Two images of each class, one of each part of which is cut off: the second ``cat``."""
    write_folder(tmp_path, each=2)
    for part in ("train", "val"):
        path = tmp_path / part / "cat" / "1.jpg"
        path.write_bytes(path.read_bytes()[:300])
    return tmp_path


def quietly(loader) -> list:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(loader)


@pytest.mark.parametrize("part", ["train", "val", "predict"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_truncated_image_is_named(damaged, part, workers):
    data = ready(ImageFolder(str(damaged), image_size=32, batch_size=2, num_workers=workers))
    message = r"^data: \S+/cat/1.jpg is not a readable image \(.*\); data.on_corrupt=skip [\w ]+$"
    with pytest.raises(UserError, match=message) as error:
        list(getattr(data, f"{part}_dataloader")())
    one_line(error)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_truncated_image_is_skipped(damaged, workers):
    """Training has the next one in its place, evaluation leaves it out, and no batch is empty."""
    options = {"image_size": 32, "num_workers": workers, "on_corrupt": "skip"}
    data = ready(ImageFolder(str(damaged), batch_size=3, augment=False, **options))
    (images, labels), *_ = quietly(ready(ImageFolder(str(damaged), batch_size=4, augment=False, **options)).train_dataloader())
    assert sorted(labels.tolist()) == [0, 1, 1, 1]
    assert sum(torch.equal(images[i], images[j]) for i in range(4) for j in range(i)) == 1
    assert [labels.tolist() for _, labels in quietly(data.test_dataloader())] == [[0, 1], [1]]
    alone = ready(ImageFolder(str(damaged), batch_size=1, **options))
    assert [labels.tolist() for _, labels in quietly(alone.val_dataloader())] == [[0], [1], [1], [1]]
    with pytest.warns(UserWarning, match="left out: .*val/cat/1.jpg") if not workers else nullcontext():
        paths = [path for _, paths in data.predict_dataloader() for path in paths]
    left = [path and str(Path(path).relative_to(damaged / "val")) for path in paths]
    assert left == ["cat/0.png", "", "dog/0.png", "dog/1.jpg"]


def test_some_classes_of_a_folder_without_hidden_files(tmp_path):
    write_folder(tmp_path, classes=("ant", "cat", "dog"), each=2)
    for hidden in ("train/.ipynb_checkpoints/0.png", "train/dog/._0.png"):
        (tmp_path / hidden).parent.mkdir(exist_ok=True)
        (tmp_path / hidden).write_bytes((tmp_path / "train/cat/0.png").read_bytes())
    assert ready(ImageFolder(str(tmp_path), image_size=8)).class_names == ["ant", "cat", "dog"]
    data = ready(ImageFolder(str(tmp_path), image_size=8, classes=["dog", "ant"]))
    assert (data.num_classes, data.class_names) == (2, ["dog", "ant"])
    train = data.split("train")
    assert sorted(train[index][1] for index in range(len(train))) == [0, 0, 1, 1]


def test_a_part_of_each_class_is_held_out_where_there_is_no_folder_val(tmp_path):
    write_folder(tmp_path, parts=("photos", "split/train"), each=20, size=8)
    with pytest.raises(UserError, match="val/<class>; put .* or hold out a part of train, as data.val_fraction=0.1 does"):
        ready(ImageFolder(str(tmp_path / "split"), image_size=8))
    for folder, options, held in (("photos", {}, 2), ("photos", {"val_fraction": 0.3}, 6), ("split", {"val_fraction": 0.3}, 6)):
        data = ready(ImageFolder(str(tmp_path / folder), image_size=8, **options))
        train, val = (data.split(part).samples for part in ("train", "val"))
        assert (data.class_names, data.split("test") is data.split("val")) == (["cat", "dog"], True)
        assert len({*train, *val}) == 40 and [sum(label == of for _, label in val) for of in (0, 1)] == [held, held]
        assert ready(ImageFolder(str(tmp_path / folder), image_size=8, seed=7, **options)).split("val").samples == val
    alone = ready(ImageFolder(str(tmp_path / "photos"), image_size=8, classes=["dog", "cat"]))
    assert {(Path(path).parent.name, label) for path, label in alone.split("val").samples} == {("dog", 0), ("cat", 1)}


def test_a_subclass_may_evaluate_other_data(tmp_path):
    class Half(ImageFolder):
        def split(self, name):
            return Subset(super().split(name), [0, 7])

    data = ready(Half(str(write_folder(tmp_path)), image_size=32))
    assert [labels.tolist() for _, labels in data.val_dataloader()] == [[0, 1]]


def test_a_layout_that_is_wrong_is_said_in_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    for folder, words in (("missing", "no file or folder"), ("empty", "no image in")):
        with pytest.raises(UserError, match=words):
            image_files(tmp_path / folder, channels=1, image_size=8, statistics=Digits.statistics, batch_size=4)
    with pytest.raises(UserError, match="no folder .*empty/train/<class> or .*empty/<class>; put"):
        ImageFolder(str(tmp_path / "empty"))
    (tmp_path / "val").mkdir()
    with pytest.raises(UserError, match="no folder .*train/<class>; put"):
        ImageFolder(str(tmp_path))
    with pytest.raises(ValueError, match="val_fraction: .* has a folder val of its own"):
        ImageFolder(str(tmp_path), val_fraction=0.2)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "cat").mkdir()
    with pytest.raises(UserError, match="one class"):
        ImageFolder(str(tmp_path))
    (tmp_path / "train" / "dog").mkdir()
    with pytest.raises(UserError, match="no image of each class in .*cat, dog"):
        ready(ImageFolder(str(tmp_path)))
    write_folder(tmp_path / "other")
    (tmp_path / "other" / "val" / "zebra").mkdir()
    with pytest.raises(UserError, match="zebra is a class that"):
        ready(ImageFolder(str(tmp_path / "other")))


@pytest.mark.parametrize("alphas", [{"mixup_alpha": 0.4}, {"cutmix_alpha": 1.0}, {"mixup_alpha": 0.4, "cutmix_alpha": 1.0}])
def test_mixing_happens_in_training_alone(alphas):
    data = ready(Digits(batch_size=16, **alphas))
    batch = next(iter(data.train_dataloader()))
    data.trainer = Mock(training=True)
    torch.manual_seed(0)  # by chance CutMix may cut nothing
    mixed, targets = data.on_after_batch_transfer(batch, 0)
    assert targets.shape == (16, 10) and not torch.equal(mixed, batch[0])
    assert_close(targets.sum(1), torch.ones(16))
    data.trainer.training = False
    assert all(kept is given for kept, given in zip(data.on_after_batch_transfer(batch, 0), batch, strict=True))


@pytest.mark.parametrize(
    ("classes", "says"), [([0, 11], "'11' is not one of"), (["3", 3], "3 is given twice"), ([5], "5 is the only class")]
)
def test_classes_that_cannot_be_are_named(classes, says):
    with pytest.raises(UserError, match=says) as error:
        ready(Digits(classes=classes))
    one_line(error)


@pytest.mark.parametrize(
    ("data", "arguments", "words"),
    [
        (Digits, {"randaugment_magnitude": 31}, r"randaugment_magnitude must be in \[0, 30\], not 31"),
        (Digits, {"cutmix_alpha": float("inf")}, "cutmix_alpha must be at least 0, not inf"),
        (ImageFolder, {"root": "gone", "on_corrupt": "shrug"}, "on_corrupt must be error or skip, not 'shrug'"),
        (Fake, {"num_classes": 1}, "num_classes must be at least 2, not 1"),
        (StdlibText, {"layout": "pack"}, "layout must be packed or documents, not 'pack'"),
        (StdlibText, {"max_tokens": 9, "layout": "documents"}, "max_tokens must be at least context, 256, not 9"),
        (StdlibText, {"pad_to_multiple_of": 7}, "pad_to_multiple_of must divide context, but 7 does not divide 256"),
        (StdlibText, {"val_fraction": 0.5, "test_fraction": 0.5}, "leave no training"),
        (StdlibText, {"streaming": True, "layout": "documents"}, "streaming needs packed text"),
        (StdlibText, {"streaming": True, "tokenizer": "bpe"}, "streaming needs a tokenizer that is trained"),
        (TextFiles, {"files": "a.txt", "on_error": "skipp"}, "on_error must be error or skip, not 'skipp'"),
        (TextFiles, {"files": "a", "messages": "m", "completion": "c"}, "messages cannot be combined with completion"),
        (TextFiles, {"files": "a", "messages": "m", "layout": "documents"}, "messages needs task=causal_lm"),
        (TextFiles, {"files": "a", "completion": "c", "streaming": True}, "streaming cannot be combined with completion"),
        (TextFiles, {"files": "a", "messages": "m", "text": "t"}, "text cannot be combined with messages"),
        (TextFiles, {"files": "a", "prompt": "p"}, "prompt needs data.completion"),
    ],
)
def test_impossible_arguments_are_refused(data, arguments, words):
    with pytest.raises(ValueError, match=words):
        data(**arguments)


@pytest.mark.parametrize(("name", "value"), [("mean", 1e39), ("mean", float("nan")), ("std", 10**400), ("std", 0), ("std", -1)])
def test_statistics_that_nothing_can_be_normalised_with_are_refused(tmp_path, name, value):
    said = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3} | {f"image_{name}": [0.5, value, 0.5]}
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(UserError, match="does not say a mean and a deviation above 0 for three channels"):
        statistics_of(str(tmp_path))


def test_statistics_are_those_that_the_folder_of_a_model_says(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 3]}))
    assert statistics_of(str(tmp_path)) == ([0.1, 0.2, 0.3], [1, 2, 3])


def test_statistics_of_a_name_of_timm(tmp_path, monkeypatch):
    pytest.importorskip("timm")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test_vit").mkdir()  # what a training has left, not a model
    assert statistics_of("test_vit") == ([0.5] * 3, [0.5] * 3)
    for name, said in {
        "test_vit.none": "timm: Invalid pretrained tag",
        "?": r"no model '\?'; timm.list_models\(\) lists them$",
    }.items():
        with pytest.raises(UserError, match=f"^data.processor: .*{said}"):
            statistics_of(name)
