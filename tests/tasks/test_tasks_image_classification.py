"""The task: losses, schedules, and which parameters decay."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from holotrain.tasks import ImageClassifier, schedules


def rates(make, steps, **arguments):
    """The learning rate at each optimizer step."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = make(optimizer, steps, **arguments)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_cosine_rises_then_falls_along_half_a_cosine():
    seen = rates(schedules.cosine, 100, warmup=0.1, final=0.02)
    assert seen[:10] == pytest.approx([0.5 * (1 + step) / 11 for step in range(10)], rel=0.11)
    assert seen[:11] == sorted(seen[:11])
    expected = [0.01 + 0.49 * (1 + math.cos(math.pi * step / 90)) / 2 for step in range(90)]
    assert seen[10:] == pytest.approx(expected, rel=1e-6)
    assert rates(schedules.constant, 10) == [0.5] * 10
    assert rates(schedules.constant, 10, warmup=0.2)[2:] == pytest.approx([0.5] * 8)


def classifier(**options):
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 12))
    return ImageClassifier(model, 12, **options)


def test_the_loss_is_smoothed_cross_entropy_of_classes_or_probabilities():
    with pytest.raises(ValueError, match=r"label_smoothing must be in \[0, 1\), not 1.0"):
        classifier(label_smoothing=1.0)
    task = classifier(label_smoothing=0.2)
    task._trainer = SimpleNamespace(global_step=0, log_every_n_steps=100, is_last_batch=False, strategy=None)
    images, labels = torch.randn(6, 1, 2, 2), torch.arange(6)
    log_p = task(images).log_softmax(-1)
    smooth = 0.8 * nn.functional.one_hot(labels, 12) + 0.2 / 12
    expected = -(smooth * log_p).sum(-1).mean()
    torch.testing.assert_close(task.training_step((images, labels), 0), expected)
    torch.testing.assert_close(task.training_step((images, nn.functional.one_hot(labels, 12).float()), 0), expected)


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"f1": "F1"}, "metrics: f1: 'F1' names no metric of torchmetrics; use one of AUROC, "),
        ({"f1": {"average": "micro"}}, "names no metric of torchmetrics"),
        ({"loss": "F1Score"}, "metrics: 'loss' is no name for a metric"),
        ({"matrix": "ConfusionMatrix"}, "metrics: matrix: ConfusionMatrix gives more than one number"),
        ({"f1": {"metric": "F1Score", "averag": "micro"}}, "metrics: f1: .*averag"),
    ],
)
def test_what_is_no_metric_is_refused(metrics, expected):
    with pytest.raises(ValueError, match=expected):
        ImageClassifier(nn.Flatten(), 4, metrics=metrics)


def test_the_direction_of_a_metric_and_its_value_by_hand():
    metrics = {"f1": "F1Score", "error": {"metric": "CalibrationError"}}
    task = ImageClassifier(nn.Flatten(), 2, metrics=metrics)
    assert task.monitored == {"val/accuracy": "max", "val/f1": "max", "val/error": "min", "val/loss": "min"}
    task.val_metrics.update(torch.tensor([[3.0, 0], [3, 0], [0, 3]]), torch.tensor([0, 1, 1]))
    assert task.val_metrics.compute()["val/f1"] == pytest.approx(2 / 3)  # both classes: precision and recall 1/2 and 1
