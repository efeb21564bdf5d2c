"""Optimizers of torchao in one process: their checkpoints are plain data, also forged ones, and torchao may be missing."""

import copy
import io
import re
import sys

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from holotrain.optimizers.low_bit import low_bit


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


@pytest.mark.parametrize(
    ("name", "dtype"), [("AdamW8bit", torch.float32), ("AdamW4bit", torch.bfloat16), ("AdamWFp8", torch.float64)]
)
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


FORGED = {
    "exp_avg is not of OptimState8bit": ("exp_avg", "tensor_class", "Module"),
    "exp_avg.codes is torch.uint8 (96, 64), not torch.uint8 (64, 96)": ("exp_avg", "codes", torch.zeros(96, 64).byte()),
    "exp_avg.codes is torch.int8 (64, 96), not torch.uint8": ("exp_avg", "codes", torch.zeros(64, 96).char()),
    "exp_avg.codes is missing or no tensor": ("exp_avg", "codes", [0] * 64),
    "exp_avg.codes is torch.uint8 (64, 96)": ("exp_avg", "codes", torch.zeros(64, 96).byte().to_sparse()),
    "exp_avg_sq.qmap is torch.float32 (16,), not torch.float32 (256,)": ("exp_avg_sq", "qmap", torch.zeros(16)),
    "step is torch.float32 (2,), not torch.float32 ()": ("step", torch.zeros(2)),
    "exp_avg_sq is not of OptimState8bit": ("exp_avg_sq", None),
}
"""By what is said: the place of a value in the state, and what stands there instead."""


@pytest.mark.parametrize(("refusal", "forgery"), FORGED.items())
def test_forged_states_are_refused(refusal, forgery):
    model = model_of()
    optimizer = low_bit("AdamW8bit", model.parameters())
    trained(model, optimizer, range(1))
    forged = copy.deepcopy(optimizer.state_dict())
    *place, last, new = forgery
    where = forged["state"][0]
    for key in place:
        where = where[key]
    where[last] = new
    with pytest.raises(ValueError, match=re.escape(refusal)):
        optimizer.load_state_dict(forged)


def test_without_torchao_it_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ValueError, match=r"AdamW4bit needs torchao: pip install 'holotrain\[torchao\]'"):
        low_bit("AdamW4bit", model_of().parameters())
