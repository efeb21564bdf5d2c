"""What was loaded into optimizers and schedules is compared with new ones: honest states pass, others are refused."""

import copy
import io
from functools import partial

import pytest
import torch
from covering import paired
from torch import nn
from torch.optim import lr_scheduler

from holotrain.checkpoints.comparison import FreshState
from holotrain.optimizers import InBackward
from holotrain.optimizers.low_bit import UnfitState, low_bit
from holotrain.optimizers.stepping import CombinedOptimizer

TORCHS = {
    name: each
    for name, each in vars(torch.optim).items()
    if isinstance(each, type) and issubclass(each, torch.optim.Optimizer) and name not in ("Optimizer", "SparseAdam")
}


def combined(parameters, **options):
    matrices = [each for each in parameters if each.ndim == 2]
    others = [each for each in parameters if each.ndim != 2]
    return CombinedOptimizer([torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)])


class Preconditioned(torch.optim.Optimizer):
    """Keeps a matrix for each side of a parameter, as Shampoo does."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["preconditioners"] = [torch.eye(side) for side in parameter.shape]
            state["first"] = state["preconditioners"][0]


OPTIMIZERS = TORCHS | {
    "SGD with momentum": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    "AdamW with amsgrad": partial(torch.optim.AdamW, amsgrad=True, foreach=False),
    "AdamW, fused": partial(torch.optim.AdamW, fused=True),
    "AdamW with tensors": lambda parameters, lr: torch.optim.AdamW(parameters, lr=torch.tensor(lr), foreach=False),
    "RMSprop with all": partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "of a user, with lists": lambda parameters, lr: Preconditioned(parameters, {"lr": lr}),
    "combined": combined,
    "in the backward": lambda parameters, lr: InBackward(combined(parameters)),
    "8 bits": partial(low_bit, "AdamW8bit"),
}

SCHEDULES = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiStepLR": partial(lr_scheduler.MultiStepLR, milestones=[1, 2]),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]),
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=5),
    "CosineAnnealingWarmRestarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=2),
}


def training(make, schedule=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
    parameters = [p for p in model.parameters() if make is not torch.optim.Muon or p.ndim == 2]
    optimizer = make(parameters, lr=0.01)
    return model, optimizer, schedule and schedule(optimizer)


def step(model, optimizer, schedule):
    def loss():
        optimizer.zero_grad()
        found = model(torch.ones(3, 6)).square().mean()
        found.backward()
        return found

    optimizer.step(loss) if isinstance(optimizer, torch.optim.LBFGS) else (loss(), optimizer.step())
    if schedule is not None:
        schedule.step(*([1.0] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))


def restored(make, schedule=None, change=lambda state, schedule: None):
    """A training that continues from the checkpoint of another one, which is changed meanwhile."""
    before = training(make, schedule)
    for _ in range(3):
        step(*before)
    file = io.BytesIO()
    torch.save([each and each.state_dict() for each in before[1:]], file)
    file.seek(0)
    states = torch.load(file, weights_only=True)
    change(*states)
    model, optimizer, schedules = training(make, schedule)
    fresh = FreshState([optimizer], [schedules] if schedules else [])
    optimizer.load_state_dict(states[0])
    if schedules:
        schedules.load_state_dict(states[1])
    fresh.compare([optimizer])
    step(model, optimizer, schedules)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_honest_states_of_optimizers_pass(name):
    restored(OPTIMIZERS[name])


@pytest.mark.parametrize("name", SCHEDULES)
def test_honest_states_of_schedules_pass(name):
    restored(partial(torch.optim.SGD, momentum=0.9), SCHEDULES[name])


def test_other_options_than_before_pass():
    """Those of the checkpoint hold."""

    def change(state, schedule):
        state["param_groups"][0] |= {"lr": 1, "foreach": True, "betas": [0.5, 0.6], "added": "x"}

    restored(torch.optim.AdamW, change=change)


def part(name, value):
    def change(state, schedule):
        state["state"][0][name] = value

    return change


def of_group(**options):
    return lambda state, schedule: state["param_groups"][0].update(options)


REFUSED = {
    "word": ("AdamW", of_group(lr="x"), "lr does not fit: it is 'x', in place of one like 0.01"),
    "NaN": ("AdamW", of_group(eps=float("nan")), "eps does not fit: it is nan"),
    "endless": ("Muon", of_group(ns_steps=10**30), "ns_steps does not fit: it is 10{30}"),
    "tensor": ("AdamW", of_group(lr=torch.ones(3)), "lr does not fit: it is torch.float32 \\(3,\\)"),
    "out of range": ("AdamW", of_group(betas=(2.0, 0.9)), "options do not fit: Invalid beta"),
    "switch": ("AdamW", of_group(amsgrad=True), "max_exp_avg_sq is None, not torch.float32 \\(5, 6\\)"),
    "shape": ("AdamW", part("exp_avg", torch.ones(5, 1)), "exp_avg is torch.float32 \\(5, 1\\), not torch.float32 \\(5, 6\\)"),
    "row": (
        "Adafactor",
        part("row_var", torch.ones(6, 1)),
        "row_var is torch.float32 \\(6, 1\\), not torch.float32 \\(5, 1\\)",
    ),
    "missing": ("SGD with momentum", part("momentum_buffer", None), "momentum_buffer is None"),
    "step": ("AdamW", part("step", torch.tensor(-1.0)), "its step is -1.0"),
    "step of 8 bits": ("8 bits", part("step", torch.tensor(-1.0)), "its step is -1.0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_states_are_refused(case):
    name, change, words = REFUSED[case]
    with pytest.raises(UnfitState, match=words):
        restored(OPTIMIZERS[name], change=change)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *paired(["base_lrs", "last_epoch", "get_lr", "optimizer", "_last_lr"], [5, "x", [1.0, 2.0, 3.0], {}]),
        ("last_epoch", 5),
        ("base_lrs", [1.0, 2.0, 3.0]),
    ],
)
def test_other_schedules_are_refused(name, value):
    value = -5 if (name, value) == ("last_epoch", 5) else value
    with pytest.raises(UnfitState, match=f"the schedule's {name} does not fit: it is "):
        restored(torch.optim.SGD, SCHEDULES["LambdaLR"], lambda state, schedule: schedule.update({name: copy.copy(value)}))
