"""Steps in the backward: their plan is what the tensors take."""

import pytest
import torch
from small_planners import made
from torch import nn
from tracked_memory import check_plan

from holotrain.models import RevGPT, RevViT
from holotrain.optimizers import InBackward
from holotrain.planning import TrainingStep, simulate_step
from holotrain.planning.fake_tensors import fake_tensors
from holotrain.tasks.optimizer_functions import adafactor, adamw, adamw_low_bit, muon, sgd

SIZES = {"image_size": 32, "patch_size": 4, "dim": 64, "heads": 2, "classes": 10}


def step_of(make, optimizer, fake=True):
    model = made(make, fake)
    given = torch.zeros(8, 64, dtype=torch.int64) if isinstance(model, RevGPT) else torch.zeros(8, 3, 32, 32)
    words = (given, given) if isinstance(model, RevGPT) else (given,)
    loss = lambda: model(*words).square().mean()  # noqa: E731
    return TrainingStep(model, loss, InBackward(optimizer(model)), held={"batch": [given]})


def vit(backward):
    return RevViT(**SIZES, depth=2, backward=backward)


@pytest.mark.parametrize(
    ("make", "optimizer"),
    [
        (lambda: vit("pareprop"), sgd),
        (lambda: vit("checkpoint"), muon),
        (lambda: vit("reversible"), adamw_low_bit),
        (lambda: vit("reversible"), adafactor),
        (lambda: RevGPT(vocab=260, context=64, dim=64, depth=2, heads=4, backward="reversible"), adamw),
    ],
    ids=["sgd", "muon", "8 bits", "adafactor", "tied"],
)
def test_a_plan_is_what_the_tensors_take(make, optimizer):
    with fake_tensors():
        planned = simulate_step(step_of(make, optimizer))
    check_plan(planned, step_of(make, optimizer, fake=False))


def test_a_step_that_needs_the_gradients_is_no_step_in_the_backward():
    model = nn.Linear(2, 2)
    for options in ({"clip": 1.0}, {"batches": 2}, {"rewrite": lambda: None}):
        with pytest.raises(ValueError, match="needs gradients after the backward"):
            TrainingStep(model, lambda: None, InBackward(sgd(model)), **options)
    TrainingStep(model, lambda: None, InBackward(sgd(model)), clip=1.0, clip_value=True)
