"""A classifier alone is trained: the rest has no gradient and stays."""

import pytest
import torch
from small_models import FAMILIES, example

from holotrain import models
from holotrain.models.adapters import train_head_alone


@pytest.mark.parametrize("name", ["RevViT", "Swin", "RoBERTa"])
def test_what_is_frozen_has_no_gradient_and_stays(name):
    model = getattr(models, name)(**FAMILIES[name.removeprefix("Rev")] | ({"classes": 3} if name == "RoBERTa" else {}))
    train_head_alone(model)
    before = {key: x.clone() for key, x in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(example(name, 4)).square().sum().backward()
    optimizer.step()
    for key, parameter in model.named_parameters():
        assert (parameter.grad is not None) == key.startswith("head."), key
        assert torch.equal(parameter, before[key]) != key.startswith("head."), key


def test_a_head_that_is_the_embedding_is_not_trained_alone():
    model = models.RevGPT(**FAMILIES["GPT"])
    with pytest.raises(ValueError, match="a RevGPT has no separate head to train: its head is tied to the embedding"):
        train_head_alone(model)
    assert all(parameter.requires_grad for parameter in model.parameters())
