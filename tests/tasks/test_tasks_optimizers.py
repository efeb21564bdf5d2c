"""Muon beside AdamW: which parameters go where, and several optimizers that step as one."""

import copy

import pytest
import torch
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


def test_several_optimizers_step_as_one():
    model, *data = problem()
    apart = copy.deepcopy(model)
    expected = trained(apart, parts_of(apart), 6, *data)
    assert all(
        torch.equal(*pair)
        for pair in zip(trained(model, [CombinedOptimizer(parts_of(model))], 6, *data), expected, strict=True)
    )


def test_a_schedule_and_a_checkpoint_take_them_for_one():
    model, *data = problem()
    combined = CombinedOptimizer(parts_of(model))
    schedule = schedules.cosine(combined, 8)
    trained(model, [combined], 3, *data, schedule)
    assert combined.parts[0].param_groups[0]["lr"] == combined.param_groups[0]["lr"] < 0.1
    other = copy.deepcopy(model)
    kept, kept_schedule = copy.deepcopy(combined.state_dict()), schedule.state_dict()
    expected = trained(model, [combined], 4, *data, schedule)
    resumed = CombinedOptimizer(parts_of(other))
    schedule = schedules.cosine(resumed, 8)
    resumed.load_state_dict(kept)
    schedule.load_state_dict(kept_schedule)
    for found, wanted in zip(trained(other, [resumed], 4, *data, schedule), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
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


def test_adamw_takes_one_kernel_on_a_gpu_and_leaves_scaling_to_the_trainer(monkeypatch):
    """Lightning clips no gradients of an optimizer that unscales them itself."""
    results = []
    for on_gpu in (False, True):
        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor, on_gpu=on_gpu: on_gpu))
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = optimizer_functions.adamw(model, lr=0.1)
        monkeypatch.undo()
        assert bool(optimizer.defaults["fused"]) == on_gpu
        assert not getattr(optimizer, "_step_supports_amp_scaling", False)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).square().sum().backward()
            optimizer.step()
        results.append(model.weight.detach())
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)
