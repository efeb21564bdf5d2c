"""The task of error diffusion, and its monitor, in a bare Trainer."""

import pytest
import torch
from small_trainings import Memo, quiet_trainer
from torch.utils.data import DataLoader, TensorDataset

from holotrain.callbacks import ErrorDiffusionMonitor
from holotrain.models import ImageErrorDiffusion
from holotrain.tasks import ErrorDiffusionClassifier


def task_of(classes=3, clamp_signs=False, lr=0.3, **options):
    torch.manual_seed(0)
    model = ImageErrorDiffusion(4, 1, classes, **{"width": 8, "depth": 3, **options})
    return ErrorDiffusionClassifier(model, classes, clamp_signs, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=lr))


def batches(classes=3, count=24, batch=8):
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(count, 1, 4, 4), torch.arange(count) % classes), batch_size=batch)


def fit(task, loader, *callbacks, **options):
    memo = Memo()
    options = {"max_epochs": 1, "log_every_n_steps": 1, **options}
    quiet_trainer(logger=memo, callbacks=list(callbacks), **options).fit(task, loader)
    return memo


def test_the_loss_is_half_the_squared_error():
    task = task_of()
    outputs, labels = torch.tensor([[0.5, 0.0, 1.0], [1.0, 0.0, 0.0]]), torch.tensor([2, 0])
    assert task.criterion(outputs, labels).item() == pytest.approx(0.5 * 0.25 / 2)
    assert task.criterion(outputs, torch.eye(3)[labels]).item() == pytest.approx(0.5 * 0.25 / 2)
    smoothed = torch.tensor([[0.1, 0.1, 0.8], [0.8, 0.1, 0.1]])
    assert task.criterion(outputs, labels, 0.3).item() == pytest.approx(0.5 * (outputs - smoothed).square().sum().item() / 2)


def test_two_classes_share_one_output():
    task = task_of(classes=2)
    assert task(torch.randn(5, 1, 4, 4)).shape == (5, 1)
    outputs, labels = torch.tensor([[0.2], [0.9]]), torch.tensor([0, 1])
    assert task.criterion(outputs, labels).item() == pytest.approx(0.5 * (0.04 + 0.01) / 2)
    assert task.criterion(outputs, labels, 0.2).item() == pytest.approx(0.5 * 0.01 / 2)
    assert task.probabilities(outputs).tolist() == [pytest.approx([0.8, 0.2]), pytest.approx([0.1, 0.9])]


def test_several_outputs_are_shares():
    found = task_of().probabilities(torch.tensor([[0.1, 0.1, 0.2], [0.0, 0.0, 0.0]])).tolist()
    assert found == [pytest.approx([0.25, 0.25, 0.5]), [0.0, 0.0, 0.0]]


@pytest.mark.parametrize(("options", "parts"), [({}, 1), ({"accumulate_grad_batches": 3}, 3)])
def test_a_step_is_the_rules_update(options, parts):
    task, loader = task_of(), batches()
    before = [parameter.detach().clone() for parameter in task.parameters()]
    seen = list(loader)[:parts]
    loss = sum(task.criterion(task(images), labels) for images, labels in seen) / parts
    expected = [b - 0.3 * g for b, g in zip(before, torch.autograd.grad(loss, list(task.parameters())), strict=True)]
    fit(task, loader, max_steps=1, **options)
    for parameter, wanted, start in zip(task.parameters(), expected, before, strict=True):
        torch.testing.assert_close(parameter.detach(), wanted)
        assert (parameter >= start).all() and (parameter > start).any()


@pytest.mark.parametrize(("rule", "lr"), [("kaneko", 0.3), ("article", 0.3), ("backpropagation", 0.1)])
def test_each_rule_learns_three_pictures_with_noise(rule, lr):
    task, labels = task_of(rule=rule, lr=lr, depth=1), torch.arange(96) % 3
    torch.manual_seed(1)
    images = torch.rand(3, 1, 4, 4)[labels] + 0.3 * torch.randn(96, 1, 4, 4)
    fit(task, DataLoader(TensorDataset(images, labels), batch_size=8), max_epochs=2)
    assert (task.probabilities(task(images)).argmax(1) == labels).float().mean() > 0.95


@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 2}])
def test_the_monitor_logs_signs_dead_cells_and_alignment(options):
    memo = fit(task_of(), batches(count=64), ErrorDiffusionMonitor(every_n_steps=2), **options)
    steps = [2, 4] if "accumulate_grad_batches" in options else [2, 4, 6, 8]
    found = {name: memo.of(f"error_diffusion/{name}") for name in ("sign_violations", "dead_cells", "alignment")}
    assert all([step for step, _ in rows] == steps for rows in found.values())
    assert all(value == 0 for _, value in found["sign_violations"])
    assert all(0 <= value < 1 for _, value in found["dead_cells"])
    assert all(0 < value < 1 for _, value in found["alignment"])
