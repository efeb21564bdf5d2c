"""Plans of models whose blocks make_reversible coupled."""

from functools import partial

import pytest
import torch
from small_planners import made
from torch import nn
from torch.nn import functional as F
from tracked_memory import check_plan

from holotrain.models import RevGPT
from holotrain.models.block_schedules import sequences
from holotrain.planning.choice import Visit, _leaves, stage_of, visits_of
from holotrain.planning.fake_tensors import fake_tensors
from holotrain.planning.training_step import TrainingStep, simulate_step
from holotrain.reversible import make_reversible

WIDTH = 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.outer = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, scale=1.0):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.outer(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)) * scale
        return x + self.mlp(self.norm2(x))


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks = nn.Linear(8, WIDTH), nn.ModuleList(Block() for _ in range(6))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x


def training_step(backward, fake=False):
    model = made(lambda: make_reversible(Tower(), backward=backward), fake)
    given = (torch.zeros(16, 50, 8) if fake else torch.randn(16, 50, 8),)
    return TrainingStep(
        model=model,
        loss=lambda: model(*given).square().mean(),
        optimizer=torch.optim.AdamW(model.parameters()),
        held={"batch": given},
        sequences=sequences(model),
    )


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("backward", ["autograd", "checkpoint", "reversible"])
def test_a_plan_is_what_the_tensors_take(backward, first):
    """The streams of the first batch are in fp64."""
    with fake_tensors():
        step = training_step(backward, fake=True)
        for stack in [] if first else step.sequences:
            stack.stream_dtype = torch.float32
        planned = simulate_step(step)
    step = training_step(backward)
    if not first:
        step.loss()  # chooses the grid
    check_plan(planned, step)


def test_rotary_positions_get_no_gradients():
    """A block is given them in a tuple beside its stream, and holds no more than if they had a name."""
    half = partial(torch.autocast, "cpu", torch.bfloat16)
    with fake_tensors():
        model = RevGPT(vocab=16, context=64, dim=32, depth=2, heads=2, backward="autograd")
        tokens = torch.zeros(4, 64, dtype=torch.long)
        optimizer = torch.optim.SGD(model.parameters())
        step = TrainingStep(model, lambda: model(tokens, tokens), optimizer, half, sequences=[model.blocks])
        (visit,) = visits_of(step)
        named = Visit(visit.sequence, visit.args[:1], {"f_kwargs": visit.args[1]})
        held = [stage_of(each, {"autograd": 1.0}, half).options[0].held for each in (visit, named)]
    assert held[0] == held[1]


def test_what_a_block_is_given_is_not_changed_by_its_measurement():
    stream, bias = torch.zeros(2, 3), nn.Parameter(torch.ones(3))
    (own, (copied,)), kwargs = _leaves(Visit(nn.Identity(), (stream, (bias,)), {"scale": bias}))
    assert own.requires_grad and not stream.requires_grad
    for each in (copied, kwargs["scale"]):
        assert each.requires_grad and each is not bias and each.data_ptr() == bias.data_ptr()
