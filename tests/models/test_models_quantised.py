"""Quantised models: nearly the same outputs in all that is done with a model; what is trained above them learns as usual."""

import copy
import sys

import pytest
import small_models
import torch
from compared import assert_equal
from covering import slow
from small_models import example
from torch import nn

from holotrain.models import RevGPT, RevRoBERTa, RevSwin, ViT
from holotrain.models.adapters import add_peft, merge_peft
from holotrain.models.quantised import Quantised, bits_of, dequantise, parameter_count, quantise, quantised_counts

TEXT = small_models.TEXT | {"context": 40, "dim": 32}
IMAGE = small_models.IMAGE | {"dim": 32}
WINDOWS = small_models.WINDOWS | {"dim": 16}

ERRORS = {8: 0.03, 4: 0.4}


def model_of(model_class, **arguments):
    torch.manual_seed(0)
    model = model_class(**arguments).eval().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.weight.normal_(1, 0.5)
    return model


@pytest.mark.parametrize("bits", ERRORS)
@pytest.mark.parametrize(
    ("model_class", "arguments"),
    [(RevGPT, TEXT | {"positions": "learned"}), (RevSwin, WINDOWS), (RevRoBERTa, TEXT), (RevRoBERTa, TEXT | {"classes": 3})],
)
def test_outputs_hardly_change(model_class, arguments, bits):
    model = model_of(model_class, **arguments)
    inputs, count = example(model_class.__name__), parameter_count(model)
    expected = model(inputs)
    quantise(model, bits)
    outputs = model(inputs)
    assert 0 < (outputs - expected).norm() / expected.norm() <= ERRORS[bits]
    assert bits_of(model) == bits and parameter_count(model) == count
    assert {part.numbers.itemsize for part in model.modules() if isinstance(part, Quantised)} == {1}
    dequantise(model)
    assert_equal(model(inputs), outputs)
    assert bits_of(model) is None and sum(each.numel() for each in model.parameters()) == count


def linear(rows, columns, dtype=torch.float32):
    torch.manual_seed(rows)
    return nn.Linear(columns, rows, dtype=dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(64, 512), (48, 64), (3, 128), (16, 20), (2, 32)])
def test_four_bits_are_those_of_torchao(rows, columns, dtype):
    """Also where the scales share theirs in groups of fewer than 256, and where blocks go over the ends of rows."""
    model = nn.Sequential(linear(rows, columns, dtype))
    blocks = rows * columns // 64
    published = pytest.importorskip("torchao.quantization").to_nf4(model[0].weight.detach(), 64, min(blocks & -blocks, 256))
    quantise(model, 4)
    assert_equal(model[0].weight, published.get_original_weight())
    assert_equal(model[0].numbers.flatten(), published.quantized_data)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("has_bias", [True, False])
def test_gradients_pass_and_no_weight_is_kept_for_them(bits, has_bias):
    torch.manual_seed(0)
    layer = nn.Linear(64, 48, bias=has_bias, dtype=torch.float64)
    model = nn.Sequential(layer)
    layer.weight.requires_grad_(False)
    quantise(model, bits)
    plain = copy.deepcopy(model)
    dequantise(plain)
    x, saved = torch.randn(5, 64, dtype=torch.float64, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        output = model(x)
    assert saved and not any(tensor.is_floating_point() and tensor.shape == (48, 64) for tensor in saved)
    found, expected = (torch.autograd.grad(each(x).square().sum(), [x, *trained(each)]) for each in (model, plain))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert output.shape == (5, 48) and len(found) == 1 + has_bias


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def test_only_frozen_layers_of_their_own_are_quantised():
    parts = {
        "words": nn.Embedding(40, 64),  # of which the head below is a second layer
        "positions": nn.Embedding(12, 64),
        "renormed": nn.Embedding(12, 64, max_norm=1),  # which writes to its weight
        "frozen": nn.Linear(64, 64),
        "odd": nn.Linear(63, 5),
        "trained": nn.Linear(64, 64),
        "head": nn.Linear(64, 40, bias=False),
    }
    parts["head"].weight = parts["words"].weight
    model = nn.ModuleDict(parts).requires_grad_(False)
    model.trained.requires_grad_()
    quantise(model, 4)
    found = {name: getattr(part, "bits", None) for name, part in model.items()}
    assert found == dict.fromkeys(parts) | {"positions": 8, "frozen": 4, "odd": 8}
    assert quantised_counts(model) == {4: 64 * 64, 8: 12 * 64 + 63 * 5}


def test_it_is_done_once_and_takes_torchao(monkeypatch):
    model = model_of(ViT, **IMAGE)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ValueError, match=r"quantised weights need torchao: pip install 'holotrain\[torchao\]'"):
        quantise(model)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="bits must be 8 or 4, not 3"):
        quantise(model, 3)
    with pytest.raises(ValueError, match="this Linear has no frozen Linear layer or embedding to quantise"):
        quantise(nn.Linear(4, 4))
    quantise(model, 4)
    with pytest.raises(ValueError, match="this ViT is quantised already, in 4 bits"):
        quantise(model)


@pytest.mark.parametrize(("backward", "bits"), [("autograd", 8), ("reversible", 4), slow("pareprop", 8)])
def test_lora_learns_above_few_bits(backward, bits):
    """Gradients are those of whole weights with the same numbers, the base stays, and merging keeps the outputs."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = RevGPT(**small_models.TEXT | {"dim": 64}, backward=backward).double()
    add_peft(model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    quantise(model, bits)
    plain, tokens = copy.deepcopy(model), example("RevGPT")
    dequantise(plain)
    gradients = [torch.autograd.grad(loss_of(each, tokens), trained(each)) for each in (model, plain)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)

    base = {name: buffer.clone() for name, buffer in model.named_buffers() if ".base_layer." in name}
    optimizer, losses = torch.optim.AdamW(trained(model), lr=3e-2), []
    for _ in range(8):
        optimizer.zero_grad()
        losses.append(loss_of(model, tokens))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.95 * losses[0] and base
    assert_equal({name: buffer for name, buffer in model.named_buffers() if ".base_layer." in name}, base)
    outputs = model.eval()(tokens)
    merge_peft(model)
    assert not any("lora" in name for name, _ in model.named_modules())
    torch.testing.assert_close(model(tokens), outputs)


def loss_of(model, tokens):
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
