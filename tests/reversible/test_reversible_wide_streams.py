"""Streams in fp64 of a model in fp32: those of a first batch, and all where a few elements are much larger than the others."""

import pytest
import torch
from torch import nn

from holotrain.reversible import make_reversible, stack_of

WIDTH, DEPTH = 16, 6


class Block(nn.Module):
    def __init__(self, in_place=False):
        super().__init__()
        self.norm, self.layer, self.in_place = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), in_place

    def forward(self, x):
        if self.in_place:
            x += self.layer.bias
            return x
        return x + self.layer(self.norm(x)).tanh()


class Tower(nn.Module):
    """``change`` is called with the number of each block, its input and its output."""

    def __init__(self, in_place=False, bias=True, change=None):
        super().__init__()
        self.stem, self.change = nn.Linear(WIDTH, WIDTH, bias=bias), change
        self.blocks = nn.ModuleList(Block(in_place) for _ in range(DEPTH))

    def forward(self, x):
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            y = block(x)
            if self.change is not None:
                self.change(number, x, y)
            x = y
        return x


def tower(backward, **options):
    torch.manual_seed(0)
    return make_reversible(Tower(**options), backward=backward).train()


def gradients_of(model, x, retained=False):
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(x).square().sum()
    loss.backward(retain_graph=retained)
    if retained:
        model.zero_grad()
        loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def batch(large):
    torch.manual_seed(2)
    x = torch.randn(2, 5, WIDTH)
    x[:, 0, 0] *= 1e6 if large else 1
    return x


@pytest.mark.parametrize("large", [False, True], ids=["first", "every"])
@pytest.mark.parametrize("retained", [False, True])
def test_gradients_are_those_of_the_stored_recurrence(large, retained):
    """In fp32, also if the graph is used twice."""
    models = [tower(backward) for backward in ("autograd", "reversible")]
    for _ in range(2 if large else 1):
        stored, rebuilt = (gradients_of(model, batch(large), retained) for model in models)
        assert all(gradient.dtype == torch.float32 for gradient in rebuilt.values())
        torch.testing.assert_close(rebuilt, stored, rtol=1e-5, atol=1e-6)
    assert (stack_of(models[1].blocks[0]).stream_dtype == torch.float64) == large


def test_after_a_batch_of_zeros_the_grid_is_chosen_in_fp64():
    models = [tower(backward, bias=False) for backward in ("autograd", "reversible")]
    for model in models:
        for block in model.blocks:
            nn.init.zeros_(block.layer.bias)
            nn.init.zeros_(block.norm.bias)
    for x in (torch.zeros(2, 5, WIDTH), batch(False)):
        stored, rebuilt = (gradients_of(model, x) for model in models)
        torch.testing.assert_close(rebuilt, stored, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backward", ["autograd", "checkpoint", "reversible"])
def test_a_block_that_changes_its_input_is_refused(backward):
    model = tower(backward, in_place=True)
    with pytest.raises(ValueError, match="in place"):
        gradients_of(model, batch(True))


@pytest.mark.parametrize("backward", ["autograd", "checkpoint", "reversible"])
def test_a_stream_that_is_changed_after_its_use_is_refused(backward):
    def change(number, x, y):
        if number == 3:
            x.mul_(3)

    model = tower(backward, change=change)
    with pytest.raises(ValueError, match="in place"):
        gradients_of(model, batch(True))
