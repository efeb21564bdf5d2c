"""Predictions, confusion matrices and samples of text: what is counted and shown, and that the training stays the same."""

import numpy as np
import pytest
import torch
from compared import assert_equal
from memo import Memo
from shown_runs import Logged, adamw, assert_trains_as_without, fit, images

from holotrain.callbacks import ConfusionMatrix, Predictions, Samples, drawing
from holotrain.callbacks.classifiers import picture_of
from holotrain.callbacks.drawing import grid, markdown, matrix
from holotrain.data import TextFiles
from holotrain.models import GPT, generate
from holotrain.models.generation import Sampling
from holotrain.tasks import CausalLM


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
    """A logger with Lightning's ``log_image`` and ``log_text``, as WandbLogger."""

    def log_image(self, key, images, step=None, **kwargs):
        self.rows.append((step, {key: images}))

    def log_text(self, key, columns=None, data=None, dataframe=None, step=None):
        self.rows.append((step, {key: (columns, data)}))


def test_a_logger_that_shows_images_gets_them_with_the_names_that_were_chosen(drawn):
    (task, data), logger, names = images(), Shows(), list("abcdefghij")
    fit(task, data, [Predictions(count=2), ConfusionMatrix(class_names=names)], logger=logger)
    assert logger.of("val/predictions") and logger.of("val/confusion_matrix")
    assert [shown for _, shown in drawn["matrix"]] == [names] * 2


@pytest.fixture
def text(tmp_path):
    for index in range(40):
        (tmp_path / f"{index}.txt").write_text(f"Document {index} says that {index} and {index} are {2 * index}.\n" * 3)
    sizes = {"context": 32, "batch_size": 8, "val_fraction": 0.2, "test_fraction": 0.1}
    return TextFiles(str(tmp_path / "*.txt"), cache_dir=str(tmp_path / "cache"), **sizes)


def gpt(data, dropout=0.3):
    torch.manual_seed(0)
    data.prepare_data()
    model = GPT(vocab=data.vocab_size, context=32, dim=16, depth=1, heads=2, dropout=dropout)
    return CausalLM(model, torch.from_numpy(data.tokenizer.byte_lengths), optimizer=adamw)


def test_prompts_are_beginnings_of_documents_and_texts_what_the_model_writes(text, tmp_path):
    task = gpt(text)
    fit(task, text, [Samples(count=3, tokens=16, seed=5)], tmp_path)
    logged = Logged(tmp_path).texts("val/samples")
    assert [step for step, _ in logged] == [4, 8]  # not at the sanity check
    corpus, tokenizer = text.part("val"), text.tokenizer
    documents = [corpus.tokens[first : last - 1] for first, last in zip(corpus.offsets[:-1], corpus.offsets[1:], strict=True)]
    chosen = [documents[place * len(documents) // 3] for place in range(3)]
    starts = [torch.from_numpy(document[:8].astype("int64")) for document in chosen]  # half of tokens, a quarter of context
    generator = torch.Generator().manual_seed(5)
    rows = torch.stack([*generate(task.model.eval(), starts, 16, Sampling(), tokenizer.end_id, generator)], 1).tolist()
    ended = [row[: row.index(tokenizer.end_id)] if tokenizer.end_id in row else row for row in rows]
    pairs = [(tokenizer.decode(start.tolist()), tokenizer.decode(row)) for start, row in zip(starts, ended, strict=True)]
    assert pairs[0][0] == "Document" and logged[-1][1] == markdown(["prompt", "continuation"], pairs)


def test_a_training_is_the_same_with_and_without(text, tmp_path):
    assert_trains_as_without([Samples(tokens=8)], tmp_path, lambda: (gpt(text), text), precision="bf16-mixed")


def test_a_diverged_model_does_not_end_the_training(text):
    task, logger = gpt(text), Shows()
    with torch.no_grad():
        task.model.norm.weight.fill_(float("nan"))
    fit(task, text, [Samples(tokens=4)], logger=logger)
    (_, (_, rows)), _ = logger.of("val/samples")
    assert "diverged" in rows[0][1]


def test_mistakes_are_told_before_the_training(text):
    for options in ({"prompts": "one text"}, {"prompts": []}, {"count": 0}, {"tokens": 0}, {"temperature": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Samples(**options)
    with pytest.raises(ValueError, match="fills the model's context of 32 tokens"):
        fit(gpt(text), text, [Samples(["x" * 32])])
