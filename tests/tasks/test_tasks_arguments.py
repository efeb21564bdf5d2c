"""Arguments that no task can be made from, each refused by name."""

import pytest
import torch
from torch import nn

from holotrain.models.image_error_diffusion import ImageErrorDiffusion
from holotrain.tasks import CausalLM, ErrorDiffusionClassifier, ImageClassifier, MaskedLM, SequenceClassifier

CLASSES = {"model": nn.Identity(), "classes": 3}
BYTES = {"model": nn.Identity(), "token_bytes": torch.tensor([1, 1, 0])}


@pytest.mark.parametrize(
    ("task", "arguments", "words"),
    [
        (ImageClassifier, {**CLASSES, "label_smoothing": 1.0}, r"label_smoothing must be in \[0, 1\), not 1.0"),
        (SequenceClassifier, {**CLASSES, "label_smoothing": -0.1}, r"label_smoothing must be in \[0, 1\), not -0.1"),
        (
            ErrorDiffusionClassifier,
            {"model": ImageErrorDiffusion(2), "classes": 10, "label_smoothing": 2},
            r"label_smoothing must be in \[0, 1\), not 2",
        ),
        (MaskedLM, {**BYTES, "mask_id": 2, "mask_probability": 0.0}, r"mask_probability must be in \[0.001, 1\), not 0.0"),
        (MaskedLM, {**BYTES, "mask_id": 2, "mask_probability": 1}, r"mask_probability must be in \[0.001, 1\), not 1"),
    ],
)
def test_impossible_arguments_are_refused(task, arguments, words):
    with pytest.raises(ValueError, match=words):
        task(**arguments)


@pytest.mark.parametrize(("task", "arguments"), [(ImageClassifier, CLASSES), (CausalLM, BYTES)])
def test_unknown_arguments_are_refused(task, arguments):
    with pytest.raises(TypeError, match="'smooth'"):
        task(**arguments, smooth=0.1)
