"""Predictions and confusion matrices: what is counted and drawn, and that the training stays the same."""

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from compared import assert_equal
from memo import Memo
from shown_runs import DropoutNet, Logged, adamw, fit, images
from small_trainings import quiet_trainer
from torch.utils.data import DataLoader, TensorDataset

from holotrain.callbacks import ConfusionMatrix, Predictions, drawing
from holotrain.callbacks.classifiers import picture_of
from holotrain.callbacks.drawing import BLUE, grid, matrix


@pytest.fixture
def drawn(monkeypatch):
    """What is passed on to be drawn: matrices with names, images with captions."""
    seen = {"matrix": [], "grid": []}

    def noted(name, draw):
        return lambda *given: (seen[name].append(given), draw(*given))[1]

    monkeypatch.setattr(drawing, "matrix", noted("matrix", matrix))
    monkeypatch.setattr(drawing, "grid", noted("grid", grid))
    return seen


def validation(task, data):
    """Images, labels and probabilities of all of the validation set."""
    batches = list(data.val_dataloader())
    task.eval()
    with torch.no_grad():
        return (
            torch.cat([x for x, _ in batches]),
            torch.cat([y for _, y in batches]),
            torch.cat([task(x).softmax(1) for x, _ in batches]),
        )


def test_the_matrix_counts_the_validation_with_the_weights_of_that_moment(drawn, tmp_path):
    task, data = images()
    drawer = ConfusionMatrix()
    trainer, _ = fit(task, data, [drawer], tmp_path)
    _, labels, probabilities = validation(task, data)
    counts, names = drawn["matrix"][-1]
    expected = np.zeros((10, 10), dtype=int)
    np.add.at(expected, (labels.numpy(), probabilities.argmax(1).numpy()), 1)
    assert counts.tolist() == expected.tolist() and names == [str(digit) for digit in range(10)]
    logged = Logged(tmp_path).images("val/confusion_matrix")
    assert [step for step, _ in logged] == [4, 8]  # not at the sanity check
    assert_equal(torch.tensor(np.asarray(logged[-1][1])), torch.tensor(np.asarray(matrix(expected, names))))
    trainer.test(task, datamodule=data, verbose=False)
    assert drawn["matrix"][-1][0].sum() == len(data.split("test")) and not task._forward_hooks
    assert [step for step, _ in Logged(tmp_path).images("test/confusion_matrix")] == [8]


def test_more_classes_than_it_shows_are_not_drawn(tmp_path):
    task, data = images()
    drawer = ConfusionMatrix(max_classes=9)
    fit(task, data, [drawer], tmp_path)
    assert drawer.image is None and "val/confusion_matrix" not in Logged(tmp_path).tags["images"]


def test_predictions_show_the_same_images_with_what_the_model_says(drawn, tmp_path):
    task, data = images()
    fit(task, data, [Predictions(count=6)], tmp_path)
    assert [step for step, _ in Logged(tmp_path).images("val/predictions")] == [4, 8]
    (first, _), (last, captions) = drawn["grid"]
    assert [np.asarray(one).tolist() for one in first] == [np.asarray(one).tolist() for one in last] and len(last) == 6
    pixels, labels, probabilities = validation(task, data)
    raw = {picture_of(image, data.statistics).tobytes(): row for row, image in enumerate(pixels)}
    rows = [raw[image.tobytes()] for image in last]
    assert len(set(rows)) == 6 and max(rows) > 3 * len(labels) / 4 > len(labels) / 4 > min(rows)  # spread over the set
    for row, ((label, _, _), (said, share, colour)) in zip(rows, captions, strict=True):
        probability, predicted = probabilities[row].max(0)
        assert label == f"label {labels[row]}" and said == f"predicted {predicted}"
        assert share == f", {100 * probability:.0f}%"
        assert colour == (drawing.GREEN if labels[row] == predicted else drawing.RED)


def test_images_look_as_before_they_were_normalised():
    _, data = images()
    data.setup()
    raw, _ = data.split("val")[0]
    normal, _ = next(iter(data.val_dataloader()))
    assert_equal(torch.tensor(np.asarray(picture_of(normal[0], data.statistics))[..., 0]), raw[0])
    wide = picture_of(torch.randn(5, 4, 6) * 100, None)
    assert wide.size == (6, 4) and wide.getextrema()[0] == (0, 255)  # scaled to its own range
    assert picture_of(torch.full((3, 4, 4), float("nan")), None).size == (4, 4)


class Plain(pl.LightningModule):
    """Knows nothing of holotrain; with ``other``, its batches or outputs are not those of an image classifier."""

    def __init__(self, other=None):
        super().__init__()
        self.net = DropoutNet(classes=3)
        self.other = other

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        if self.other == "no call":
            self.net(batch[0])
        else:
            self(batch[0])

    def configure_optimizers(self):
        return adamw(self)


class Shows(Memo):
    """A logger with Lightning's ``log_image``, as WandbLogger."""

    def log_image(self, key, images, step=None, **kwargs):
        self.rows.append((step, {key: images}))


PREDICTIONS, MATRIX = "val/predictions", "val/confusion_matrix"


@pytest.mark.parametrize(
    ("other", "logger", "expected"),
    [
        (None, Shows(), {PREDICTIONS, MATRIX}),
        (None, Memo(), set()),
        ("no call", Shows(), set()),
        ("flat", Shows(), {MATRIX}),
    ],
)
def test_any_lightning_module_and_logger(other, logger, expected, drawn):
    shape = (12, 64) if other == "flat" else (12, 1, 8, 8)
    loader = DataLoader(TensorDataset(torch.randn(shape), torch.arange(12) % 3), batch_size=6)
    callbacks = [Predictions(count=2), ConfusionMatrix(class_names=["a", "b", "c"])]
    quiet_trainer(max_epochs=1, logger=logger, callbacks=callbacks).fit(Plain(other), loader, loader)
    assert {tag for _, row in logger.rows for tag in row if tag in (PREDICTIONS, MATRIX)} == expected
    assert all(names == ["a", "b", "c"] for _, names in drawn["matrix"])


def test_a_matrix_is_drawn_in_shares_of_its_rows():
    counts = np.array([[8, 0, 0], [0, 0, 0], [1, 1, 2]])
    pixels = np.asarray(matrix(counts, ["one", "two", "three"])).astype(int)
    blue = (np.abs(pixels - BLUE).max(-1) <= 1).nonzero()
    top, left = blue[0].min(), blue[1].min()
    inside = pixels[top : top + 3 * 56, left : left + 3 * 56].reshape(3, 56, 3, 56, 3)[:, 2, :, 2]
    shares = ((255 - inside[..., 0]) / (255 - BLUE[0])) ** (1 / 0.6)
    assert shares == pytest.approx(np.array([[1, 0, 0], [0, 0, 0], [0.25, 0.25, 0.5]]), abs=0.01)
    many = matrix(np.eye(100), [f"a rather long name of class {index}" for index in range(100)])
    assert max(many.size) < 1200
