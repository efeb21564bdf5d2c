"""Arguments that no task can be made from, each refused by name."""

import pytest
import torch
from torch import nn

from holotrain.tasks import ImageClassifier, MaskedLM

CLASSES = {"model": nn.Identity(), "classes": 3}
WORDS = {"model": nn.Identity(), "token_bytes": torch.tensor([1, 1, 0]), "mask_id": 2}


@pytest.mark.parametrize(
    ("task", "arguments", "words"),
    [
        (ImageClassifier, {**CLASSES, "label_smoothing": 1.0}, r"label_smoothing must be in \[0, 1\), not 1.0"),
        (MaskedLM, {**WORDS, "mask_probability": 0.0}, r"mask_probability must be in \[0.001, 1\), not 0.0"),
    ],
)
def test_impossible_arguments_are_refused(task, arguments, words):
    with pytest.raises(ValueError, match=words):
        task(**arguments)
