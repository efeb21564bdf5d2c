"""Arguments that no data set can be made from, each refused by name."""

import json

import pytest

from holotrain.data import CIFAR10, MNIST, Digits, Fake, ImageFolder, StdlibText, TextFiles
from holotrain.data.images import statistics_of
from holotrain.errors import UserError

TEXT = [
    ({"layout": "pack"}, "layout must be packed or documents, not 'pack'"),
    ({"context": 2, "layout": "documents"}, "context must be at least 3, not 2"),
    ({"max_tokens": 9, "layout": "documents"}, "max_tokens must be at least context, 256, not 9"),
    ({"pad_to_multiple_of": 7}, "pad_to_multiple_of must divide context, but 7 does not divide 256"),
    ({"vocab_size": 259}, "vocab_size must be at least 260, not 259"),
    ({"val_fraction": 0.5, "test_fraction": 0.5}, "leave no training"),
    ({"streaming": True, "layout": "documents"}, "streaming needs packed text"),
    ({"streaming": True, "tokenizer": "bpe"}, "streaming needs a tokenizer that is trained"),
]
REFUSED = {
    Digits: [
        ({"num_workers": -1}, "num_workers must be at least 0, not -1"),
        ({"randaugment_magnitude": 31}, r"randaugment_magnitude must be in \[0, 30\], not 31"),
        ({"cutmix_alpha": float("inf")}, "cutmix_alpha must be at least 0, not inf"),
        ({"val_fraction": 1}, r"val_fraction must be in \[0, 1\), not 1"),
    ],
    ImageFolder: [({"root": "gone", "on_corrupt": "shrug"}, "on_corrupt must be error or skip, not 'shrug'")],
    Fake: [({"num_classes": 1}, "num_classes must be at least 2, not 1")],
    StdlibText: [({"classes": 1}, "classes must be at least 2, not 1"), *TEXT],
    TextFiles: [({"files": "a.txt", "on_error": "skipp"}, "on_error must be error or skip, not 'skipp'")],
}


@pytest.mark.parametrize(("data", "arguments", "words"), [(data, *case) for data, cases in REFUSED.items() for case in cases])
def test_impossible_arguments_are_refused(data, arguments, words):
    with pytest.raises(ValueError, match=words):
        data(**arguments)


@pytest.mark.parametrize(
    ("data", "unit", "max_tokens"),
    [
        (StdlibText(), "file", None),
        (StdlibText(layout="documents"), "paragraph", 8192),
        (TextFiles("a.txt", layout="documents", unit="line", max_tokens=512), "line", 512),
        (TextFiles("a.txt", layout="documents", label="folder"), "file", 8192),
        (TextFiles("a.txt", layout="documents", label="folder", labels=False), "paragraph", 8192),
        (TextFiles("a.txt", label="folder", max_tokens=512), "file", None),
    ],
)
def test_what_a_document_is_follows_from_the_layout_and_the_labels(data, unit, max_tokens):
    assert (data.unit, data.max_tokens, data.vocab_size) == (unit, max_tokens, 260)


@pytest.mark.parametrize(("name", "value"), [("mean", 1e39), ("mean", float("nan")), ("std", 10**400), ("std", 0), ("std", -1)])
def test_statistics_that_nothing_can_be_normalised_with_are_refused(tmp_path, name, value):
    said = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3} | {f"image_{name}": [0.5, value, 0.5]}
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(UserError, match="does not say a mean and a deviation above 0 for three channels"):
        statistics_of(str(tmp_path))


@pytest.mark.parametrize(
    ("data", "classes", "shape"),
    [
        (Digits(classes=[3, 5, 7]), 3, (1, 8, 8)),
        (MNIST(), 10, (1, 28, 28)),
        (CIFAR10(classes=["cat", 5]), 2, (3, 32, 32)),
        (Fake(image_size=12, num_classes=4), 4, (3, 12, 12)),
    ],
)
def test_what_is_known_of_images_before_they_are_read(data, classes, shape):
    assert (data.num_classes, data.image_shape) == (classes, shape)
    assert len(data.statistics[0]) == len(data.statistics[1]) == shape[0]
