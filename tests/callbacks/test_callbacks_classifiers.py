"""Predictions and confusion matrices: what is counted and drawn, and that the training stays the same."""

import numpy as np
import pytest
import torch
from compared import assert_equal
from memo import Memo
from shown_runs import Logged, fit, images

from holotrain.callbacks import ConfusionMatrix, Predictions, drawing
from holotrain.callbacks.classifiers import picture_of
from holotrain.callbacks.drawing import grid, matrix


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


class Shows(Memo):
    """A logger with Lightning's ``log_image``, as WandbLogger."""

    def log_image(self, key, images, step=None, **kwargs):
        self.rows.append((step, {key: images}))


def test_a_logger_that_shows_images_gets_them_with_the_names_that_were_chosen(drawn):
    (task, data), logger, names = images(), Shows(), list("abcdefghij")
    fit(task, data, [Predictions(count=2), ConfusionMatrix(class_names=names)], logger=logger)
    assert logger.of("val/predictions") and logger.of("val/confusion_matrix")
    assert [shown for _, shown in drawn["matrix"]] == [names] * 2
