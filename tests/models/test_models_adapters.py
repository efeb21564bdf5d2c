"""Adapters on every family: nothing changes at first, and they alone learn."""

import pytest
import torch
from compared import assert_equal
from small_models import FAMILIES, example, text_batch
from torch import nn

from holotrain import models
from holotrain.models.adapters import Adapted, adapter_width, add_adapters, freeze

ENCODER = {"classes": 3, "dropout": 0.0, "attention_dropout": 0.0}
MODELS = {
    **{name: {} for name in ("ViT", "Swin", "RevSwin", "RevMViT", "GPT", "RevGPT")},
    "RevViT": {"pool": "class"},
    "RoBERTa": ENCODER,
    "RoBERTa post": ENCODER | {"norm": "post"},
    "RevRoBERTa": ENCODER,
}


def model_of(name, **options):
    torch.manual_seed(0)
    kind = name.split()[0]
    return getattr(models, kind)(**FAMILIES[kind.removeprefix("Rev")] | MODELS[name] | options)


def inputs_of(name):
    inputs, (_, mask, _) = example(name.split()[0], 4), text_batch()
    return (inputs, mask) if "RoBERTa" in name else (inputs,)


def awake(model):
    """Adapters that do something."""
    for module in model.modules():
        if isinstance(module, Adapted):
            for parameter in (*module.down.parameters(), *module.up.parameters()):
                nn.init.normal_(parameter, std=0.5)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_unchanged_at_first_and_changed_by_what_adapters_learn(name):
    model = model_of(name).eval()
    before, parameters = model(*inputs_of(name)), sum(p.numel() for p in model.parameters())
    add_adapters(model, 3)
    assert_equal(model(*inputs_of(name)), before)
    adapted = [module for module in model.modules() if isinstance(module, Adapted)]
    assert len(adapted) == (6 if "Swin" in name or "MViT" in name else 4) and adapter_width(model) == 3
    added = sum(2 * len(module.norm.weight) * 3 + len(module.norm.weight) + 3 for module in adapted)
    assert sum(p.numel() for p in model.parameters()) == parameters + added
    assert (awake(model)(*inputs_of(name)) - before).abs().max() > 1e-3


def test_an_adapter_reads_what_its_branch_gives_out():
    model = model_of("RoBERTa post").eval()
    add_adapters(model, 3)
    awake(model)
    f, x = model.blocks.blocks[0].f, torch.randn(2, 5, 16)
    y = f.branch.update(x)
    expected = y + f.up(nn.functional.gelu(f.down(y)))
    assert_equal(f.update(x), expected)
    assert_equal(f(x), f.update(f.branch.norm(x)))
    assert not torch.allclose(expected, y, atol=1e-2)


def is_trained(name, trained):
    part = name.split(".")
    return trained == "all" or part[0] == "head" or (trained == "adapters" and bool({"norm", "down", "up"} & set(part)))


@pytest.mark.parametrize("trained", ["all", "head", "adapters"])
@pytest.mark.parametrize("name", [name for name in MODELS if "MViT" not in name])  # which has too few keys here to learn all
def test_what_is_frozen_has_no_gradient_and_stays(name, trained):
    model = model_of(name)
    add_adapters(model, 3)
    if trained == "head" and name.endswith("GPT"):
        with pytest.raises(ValueError, match="GPT has no separate head"):
            freeze(model, trained)
        return
    freeze(awake(model), trained)
    before = {key: x.clone() for key, x in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(*inputs_of(name)).square().sum().backward()
    optimizer.step()
    for key, parameter in model.named_parameters():
        assert (parameter.grad is not None) == is_trained(key, trained), key
        assert torch.equal(parameter, before[key]) != is_trained(key, trained), key


def test_impossible_adapters_are_refused():
    model = model_of("ViT")
    with pytest.raises(ValueError, match="width of adapters must be at least 1, not 0"):
        add_adapters(model, 0)
    with pytest.raises(ValueError, match="this ViT has no adapters to train; add them first"):
        freeze(model, "adapters")
    with pytest.raises(ValueError, match="trained must be all, head or adapters, not 'norms'"):
        freeze(model, "norms")
    with pytest.raises(ValueError, match="a Linear has no blocks for adapters"):
        add_adapters(nn.Linear(2, 2), 3)
    add_adapters(model, 3)
    with pytest.raises(ValueError, match="this ViT already has adapters"):
        add_adapters(model, 3)
