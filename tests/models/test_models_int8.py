"""int8 models: nearly the same outputs, in everything that is done with a model but training."""

import sys

import pytest
import small_models
import torch
from small_models import example
from torch import nn

from holotrain.models import RevGPT, RevRoBERTa, RevSwin, RevViT, ViT
from holotrain.models.int8 import is_quantised, quantise

TEXT = small_models.TEXT | {"context": 40, "dim": 32}
IMAGE = small_models.IMAGE | {"dim": 32}
WINDOWS = small_models.WINDOWS | {"dim": 16}


def model_of(model_class, **arguments):
    torch.manual_seed(0)
    model = model_class(**arguments).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.normal_(1, 0.5)
    return model


@torch.no_grad()
@pytest.mark.parametrize(
    ("model_class", "arguments"),
    [
        (RevGPT, TEXT | {"positions": "learned"}),
        (RevViT, IMAGE),
        (RevSwin, WINDOWS),
        (RevRoBERTa, TEXT),
        (RevRoBERTa, TEXT | {"classes": 3}),
    ],
)
def test_outputs_hardly_change(model_class, arguments):
    model = model_of(model_class, **arguments)
    inputs = example(model_class.__name__)
    expected = model(inputs)
    quantise(model)
    error = ((model(inputs) - expected).norm() / expected.norm()).item()
    assert 0 < error <= 0.03
    assert is_quantised(model) and not any(p.requires_grad for p in model.parameters())


def test_it_is_done_once_and_takes_torchao(monkeypatch):
    model = model_of(ViT, **IMAGE)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ValueError, match=r"int8 needs torchao: pip install 'holotrain\[torchao\]'"):
        quantise(model)
    monkeypatch.undo()
    quantise(model)
    with pytest.raises(ValueError, match="this ViT is already int8"):
        quantise(model)
