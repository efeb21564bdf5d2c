"""Confusion matrices, predictions and samples of text: what is counted and shown, and that the training stays the same."""

import numpy as np
import pytest
import torch
from covering import slow
from shown_runs import Logged, adamw, assert_trains_as_without, fit, images
from small_trainings import Memo

from holotrain.callbacks import ConfusionMatrix, OptimizationMonitor, Predictions, Samples
from holotrain.data import TextFiles
from holotrain.errors import readable
from holotrain.models import GPT, generate
from holotrain.models.generation import Sampling
from holotrain.tasks import CausalLM


class Shows(Memo):
    """A logger with Lightning's ``log_image`` and ``log_text``, as WandbLogger."""

    def log_image(self, key, images, step=None, **kwargs):
        self.rows.append((step, {key: images[0]}))

    def log_text(self, key, columns=None, data=None, dataframe=None, step=None):
        self.rows.append((step, {key: data[0][0]}))


def validation(task, data):
    """Images, labels and probabilities of all of the validation set."""
    batches = list(data.val_dataloader())
    task.eval()
    with torch.no_grad():
        found = [(x, y, task(x).softmax(1)) for x, y in batches]
    return [torch.cat(each) for each in zip(*found, strict=True)]


def counts_in(figure):
    (axes,) = figure.axes
    assert axes.get_xlabel().startswith("Predicted") and axes.get_ylabel().startswith("True")
    counts = np.zeros((10, 10), dtype=int)
    for text in axes.texts:
        column, row = text.get_position()
        counts[row, column] = int(text.get_text())
    return counts


def test_the_matrix_counts_the_validation_with_the_weights_of_that_moment(tmp_path):
    task, data = images()
    matrix = ConfusionMatrix()
    trainer, _ = fit(task, data, [matrix], tmp_path)
    _, labels, probabilities = validation(task, data)
    expected = np.zeros((10, 10), dtype=int)
    np.add.at(expected, (labels.numpy(), probabilities.argmax(1).numpy()), 1)
    assert counts_in(matrix.figure).tolist() == expected.tolist()

    assert [step for step, _ in Logged(tmp_path).images("val/confusion_matrix")] == [4, 8]  # not at the sanity check
    trainer.test(task, datamodule=data, verbose=False)
    assert counts_in(matrix.figure).sum() == len(data.split("test"))
    assert [step for step, _ in Logged(tmp_path).images("test/confusion_matrix")] == [8]


@pytest.mark.parametrize("count", [2, slow(16)])  # of six batches
def test_predictions_show_the_same_images_with_what_the_model_says(count):
    (task, data), logger = images(), Shows()
    fit(task, data, [Predictions(count)], logger=logger)
    (_, first), (step, last) = logger.of("val/predictions")
    assert step == 8 and len(last.axes) == count
    shown = [[axes.images[0].get_array() for axes in figure.axes] for figure in (first, last)]
    assert all((one == other).all() for one, other in zip(*shown, strict=True))
    pixels, labels, probabilities = validation(task, data)
    own_range = [(image - image.min()) / (image.max() - image.min()) for image in pixels]
    rows = []
    for axes, image in zip(last.axes, shown[1], strict=True):
        (row,) = [row for row, each in enumerate(own_range) if np.allclose(image[..., 0], each[0], atol=1e-5)]
        rows.append(row)
        probability, predicted = probabilities[row].max(0)
        assert axes.get_title() == f"label {labels[row]}\npredicted {predicted}, {probability.item():.0%}"
        assert axes.title.get_color() == ("green" if labels[row] == predicted else "red")
    assert max(rows) >= len(labels) / 3 and min(rows) < 64  # spread over the set


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


def test_texts_are_what_the_model_writes_after_the_prompts(text, tmp_path):
    task, prompts = gpt(text), ["", "Doc", "x" * 99]
    fit(task, text, [Samples(prompts, tokens=16)], tmp_path)
    logged = Logged(tmp_path).texts("val/samples")
    assert [step for step, _ in logged] == [4, 8]  # not at the sanity check
    tokenizer = text.tokenizer
    # as much as half of the context holds
    starts = [torch.tensor([tokenizer.end_id, *tokenizer.encode(prompt).tolist()][-16:]) for prompt in prompts]
    generator = torch.Generator().manual_seed(0)
    rows = torch.stack([*generate(task.model.eval(), starts, 16, Sampling(), tokenizer.end_id, generator)], 1).tolist()
    texts = [tokenizer.decode([token for token in row if token != tokenizer.end_id]) for row in rows]
    lines = readable("\n\n".join(f"{prompt} | {text}" for prompt, text in zip(prompts, texts, strict=True))).splitlines()
    assert logged[-1][1].splitlines() == [f"    {line}" for line in lines]


def test_a_training_is_the_same_with_and_without(text, tmp_path):
    assert_trains_as_without([Samples(tokens=8)], tmp_path / "text", lambda: (gpt(text), text), precision="bf16-mixed")
    assert_trains_as_without([Predictions(), ConfusionMatrix(), OptimizationMonitor()], tmp_path / "images")


@pytest.mark.parametrize("options", [{"prompts": "one text"}, {"prompts": []}, {"tokens": 0}])
def test_mistakes_are_told_before_the_training(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Samples(**options)
