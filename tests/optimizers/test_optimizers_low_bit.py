"""Optimizers of torchao in one process: their checkpoints are plain data, also forged ones, and torchao may be missing."""

import copy
import io
import sys

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from holotrain.optimizers import low_bit

NAMES = ("AdamW8bit", "AdamW4bit", "AdamWFp8")


def trained(model, optimizer, steps):
    for step in steps:
        loss = (
            model(torch.sin(torch.arange(6 * 96.0).view(6, 96) * (step + 1)).to(next(model.parameters()).dtype)).square().mean()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_a_training_is_resumed_to_the_bit_from_plain_tensors(name, dtype):
    whole, model = model_of().to(dtype), model_of().to(dtype)
    expected = trained(whole, low_bit(name, whole.parameters(), lr=0.01), range(5))
    optimizer = low_bit(name, model.parameters(), lr=0.01)
    trained(model, optimizer, range(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    held = torch.load(file, weights_only=True)
    assert {type(leaf) for leaf in tree_leaves(held)} <= {torch.Tensor, int, float, bool, str}
    assert held["state"][0]["exp_avg"]["codes"].itemsize == 1
    resumed = low_bit(name, model.parameters(), lr=0.01)
    resumed.load_state_dict(held)
    assert all(map(torch.equal, trained(model, resumed, range(3, 5)), expected))


def test_states_of_other_classes_or_broken_ones_are_refused():
    model = model_of()
    optimizer = low_bit("AdamW8bit", model.parameters())
    trained(model, optimizer, range(1))
    state = optimizer.state_dict()
    for change, refusal in (
        ({"tensor_class": "Module"}, "of Module, a class that this optimizer does not use"),
        ({"codes": torch.zeros(3)}, r"no OptimState8bit of shape \(64, 96\)"),
        ({"floats": {"codes": "torch.load"}}, "no OptimState8bit"),
        ({"context": [True]} | {"qmap": None}, "no OptimState8bit"),
    ):
        forged = copy.deepcopy(state)
        forged["state"][0]["exp_avg"] |= change
        with pytest.raises(ValueError, match=refusal):
            optimizer.load_state_dict(forged)


def test_without_torchao_it_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ValueError, match=r"AdamW4bit needs torchao: pip install 'holotrain\[torchao\]'"):
        low_bit("AdamW4bit", model_of().parameters())
