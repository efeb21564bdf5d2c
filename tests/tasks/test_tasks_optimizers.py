"""Muon beside AdamW: which parameters go where, and several optimizers that step as one."""

import copy
from types import SimpleNamespace

import pytest
import torch
from compared import assert_equal
from small_models import sizes_of
from torch import nn

from holotrain.models import RevGPT, RevMViT
from holotrain.optimizers.stepping import CombinedOptimizer
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
