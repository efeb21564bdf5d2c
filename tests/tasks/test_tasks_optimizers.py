"""Muon beside AdamW: which parameters go where, and several optimizers that step as one."""

import copy
from types import SimpleNamespace

import pytest
import torch
from compared import assert_equal
from small_models import FAMILIES, TRANSFORMERS, sizes_of
from torch import nn

from holotrain import models
from holotrain.models import RevGPT, RevMViT
from holotrain.models.layers.blocks import ResidualBlock
from holotrain.optimizers.stepping import CombinedOptimizer
from holotrain.reversible import ReversibleBlock
from holotrain.tasks import optimizer_functions, schedules

SMALL = {"vocab": 20, "context": 8, "dim": 16, "depth": 2, "heads": 2}


@pytest.mark.parametrize(
    "make",
    [lambda: RevGPT(**SMALL, positions="learned"), lambda: RevMViT(image_size=32, classes=3, **sizes_of("MViT")["nano"])],
)
def test_muon_takes_the_matrices_of_blocks_and_adamw_the_rest(make):
    model = make()
    frozen = next(model.blocks.parameters() if hasattr(model, "blocks") else model.stages.parameters()).requires_grad_(False)
    optimizer = optimizer_functions.muon(model, lr=0.1, weight_decay=0.3)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    by_part = [{names[id(p)] for group in part.param_groups for p in group["params"]} for part in optimizer.parts]
    adamw, muon = by_part
    assert [type(part).__name__ for part in optimizer.parts] == ["AdamW", "ShardedMuon"]
    assert adamw | muon == set(names.values()) - {names[id(frozen)]} and not adamw & muon
    ends = [f"{name}.weight" for name in ("query_key_value", "qkv", "project", "widen", "narrow", "shortcut")]
    assert muon and all(".blocks." in f".{name}" and name.endswith(tuple(ends)) for name in muon)
    for group in optimizer.param_groups:
        decays = {names[id(p)] for p in group["params"] if group["weight_decay"]}
        assert not any(name.endswith(("bias", "position", "norm.weight")) for name in decays)


def rates(model, optimizer):
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[p]: float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_each_layer_learns_with_a_share_of_the_rate_of_the_next(name):
    model = getattr(models, name)(**FAMILIES[name.removeprefix("Rev")])
    optimizer = optimizer_functions.adamw(model, lr=1.0, weight_decay=0.3)
    decays = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    optimizer_functions.decay_layers(optimizer, model, 0.5)
    found, blocks = rates(model, optimizer), [m for m in model.modules() if isinstance(m, ResidualBlock | ReversibleBlock)]
    assert found.keys() == {parameter for parameter, _ in model.named_parameters()}
    assert {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]} == decays
    names = {parameter: parameter_name for parameter_name, parameter in model.named_parameters()}
    for number, block in enumerate(reversed(blocks), 1):
        assert {found[names[parameter]] for parameter in block.parameters()} == {0.5**number}
    assert {found[each] for each in found if each.startswith("embedding.")} == {0.5 ** (len(blocks) + 1)}
    assert {found[each] for each in found if each.startswith("head.")} <= {1.0}
    assert optimizer.param_groups[0]["lr"] == 1  # which is logged


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "convnext_atto"])
def test_layers_of_timm_are_those_that_timm_names(name):
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        model = timm.create_model(name)
        ours = optimizer_functions.sgd(model, lr=1.0)
        theirs = pytest.importorskip("timm.optim").create_optimizer_v2(model, "sgd", 1.0, layer_decay=0.8)
    optimizer_functions.decay_layers(ours, model, 0.8)
    optimizer_functions.decay_layers(theirs, model)  # the factors that timm leaves to its own schedules become rates
    assert rates(model, ours) == pytest.approx(rates(model, theirs)) and len({*rates(model, ours).values()}) > 6


def test_layers_of_transformers_are_the_blocks_of_its_list():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes))
    optimizer = optimizer_functions.muon(model, lr=1.0, others=1.0)
    optimizer_functions.decay_layers(optimizer, model, 0.5)
    found = rates(model, optimizer)
    for part, rate in {
        "classifier": 1,
        "bert.encoder.layer.1": 0.5,
        "bert.encoder.layer.0": 0.25,
        "bert.embeddings": 0.125,
    }.items():
        assert {found[name] for name in found if name.startswith(f"{part}.")} == {rate}
    with pytest.raises(ValueError, match="no list of"):
        optimizer_functions.layers_of(nn.Linear(2, 2))


def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    return model, torch.randn(10, 4), torch.randn(10, 3)


def parts_of(model):
    return [torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9), torch.optim.AdamW(model[1].parameters(), lr=0.01)]


def trained(model, optimizers, steps, images, targets, schedule=None):
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(images), targets)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_schedule_and_a_checkpoint_take_them_for_one():
    model, *data = problem()
    combined, apart = CombinedOptimizer(parts_of(model)), copy.deepcopy(model)
    schedule = schedules.cosine(combined, 8)
    parts = parts_of(apart)
    both = schedules.cosine(parts[0], 8), schedules.cosine(parts[1], 8)
    expected = trained(apart, parts, 3, *data, SimpleNamespace(step=lambda: [each.step() for each in both]))
    assert_equal(trained(model, [combined], 3, *data, schedule), expected)
    assert combined.parts[0].param_groups[0]["lr"] == combined.param_groups[0]["lr"] < 0.1
    other = copy.deepcopy(model)
    kept, kept_schedule = copy.deepcopy(combined.state_dict()), schedule.state_dict()
    expected = trained(model, [combined], 4, *data, schedule)
    resumed = CombinedOptimizer(parts_of(other))
    schedule = schedules.cosine(resumed, 8)
    resumed.load_state_dict(kept)
    schedule.load_state_dict(kept_schedule)
    assert_equal(trained(other, [resumed], 4, *data, schedule), expected)
    assert len(resumed.state) == len(list(other.parameters()))


def test_scaled_gradients_that_overflow_are_skipped_by_all():
    model, images, targets = problem()
    before = copy.deepcopy(model)
    combined, scaler = CombinedOptimizer(parts_of(model)), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for overflow in (True, False):
        loss = nn.functional.mse_loss(model(images), targets)
        scaler.scale(loss).backward()
        if overflow:
            model[0].weight.grad[0, 0] = float("inf")
        scaler.step(combined)
        scaler.update()
        combined.zero_grad()
        changed = [not torch.equal(*pair) for pair in zip(model.parameters(), before.parameters(), strict=True)]
        assert changed == [not overflow] * 4
