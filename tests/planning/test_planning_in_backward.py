"""Steps in the backward: their plan is what the tensors take."""

from functools import partial

import pytest
import torch
from small_planners import made
from torch import nn
from torch.distributed._tools.common_utils import get_untyped_storages
from tracked_memory import check_plan

from holotrain.models import RevGPT, RevViT
from holotrain.optimizers import InBackward
from holotrain.planning import simulate_step
from holotrain.planning.fake_tensors import fake_tensors
from holotrain.planning.training_step import TrainingStep
from holotrain.tasks.optimizer_functions import adafactor, adamw, adamw_low_bit, muon, sgd

SIZES = {"image_size": 32, "patch_size": 4, "dim": 64, "heads": 2, "classes": 10}


def step_of(make, in_backward, fake=True, batch=2, optimizer=adamw):
    model = made(make, fake)
    stepped = optimizer(model)
    given = torch.zeros(batch, 64, dtype=torch.int64) if isinstance(model, RevGPT) else torch.zeros(batch, 3, 32, 32)
    words = (given, given) if isinstance(model, RevGPT) else (given,)
    loss = lambda: model(*words).square().mean()  # noqa: E731
    return TrainingStep(model, loss, InBackward(stepped) if in_backward else stepped, held={"batch": [given]})


def vit(backward="reversible", depth=24):
    return RevViT(**SIZES, depth=depth, backward=backward)


@pytest.mark.parametrize(
    ("make", "optimizer"),
    [
        (lambda: vit("pareprop", 2), sgd),
        (lambda: vit("checkpoint", 2), muon),
        (lambda: vit("reversible", 2), adamw_low_bit),
        (lambda: vit("reversible", 2), adafactor),
        (lambda: RevGPT(vocab=260, context=64, dim=64, depth=2, heads=4, backward="reversible"), adamw),
    ],
    ids=["sgd", "muon", "8 bits", "adafactor", "tied"],
)
def test_a_plan_is_what_the_tensors_take(make, optimizer):
    with fake_tensors():
        planned = simulate_step(step_of(make, True, batch=8, optimizer=optimizer))
    check_plan(planned, step_of(make, True, fake=False, batch=8, optimizer=optimizer))


@pytest.mark.parametrize(
    ("optimizer", "least", "most"),
    [
        (adamw, 8, 8.1),
        (partial(adamw_low_bit, bits="8bit"), 2, 3),
        (adafactor, 0, 0.5),
        (muon, 4, 5),
    ],
)
def test_the_bytes_of_the_optimizers_state_are_those_that_it_holds(optimizer, least, most):
    """``least`` and ``most`` for an entry of a parameter."""
    with fake_tensors():
        planned = simulate_step(step_of(lambda: vit(depth=2), False, optimizer=optimizer)).parts["optimizer"]
    step = step_of(lambda: vit(depth=2), False, fake=False, optimizer=optimizer)
    step.begin()
    step.update()
    storages = (storage for tensor in step.optimizer_state for storage in get_untyped_storages(tensor))
    assert planned == sum({storage._cdata: storage.nbytes() for storage in storages}.values())
    entries = sum(parameter.numel() for parameter in step.model.parameters())
    assert least * entries <= planned <= most * entries


def test_a_step_that_needs_the_gradients_is_no_step_in_the_backward():
    model = nn.Linear(2, 2)
    for options in ({"clip": 1.0}, {"batches": 2}, {"rewrite": lambda: None}):
        with pytest.raises(ValueError, match="needs gradients after the backward"):
            TrainingStep(model, lambda: None, InBackward(sgd(model)), **options)
    TrainingStep(model, lambda: None, InBackward(sgd(model)), clip=1.0, clip_value=True)
