"""Schedules of models that know nothing of holotrain."""

import pytest
import torch
from compared import assert_equal
from torch import nn

from holotrain.models.block_schedules import set_backward
from holotrain.reversible import ReversibleBlock, ReversibleSequence
from holotrain.schedules import PLAIN


class Block(nn.Module):
    """Counts how often it runs."""

    def __init__(self):
        super().__init__()
        self.inner, self.runs = nn.Linear(4, 4), 0

    def forward(self, x, scale=1.0):
        self.runs += 1
        return x + scale * torch.tanh(self.inner(x))


class Tower(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x.sum()


def gradients_and_runs(model):
    for block in model.blocks:
        block.runs = 0
    loss = model(torch.linspace(-1, 1, 8).view(2, 4))
    return torch.autograd.grad(loss, list(model.parameters())), [block.runs for block in model.blocks]


def test_equal_blocks_in_a_list_are_checkpointed_and_switched_back():
    """A block may be in the list twice."""
    model = Tower([Block(), Block(), Block()] * 2)
    names, (true, _) = list(model.state_dict()), gradients_and_runs(model)
    for backward, runs in (("checkpoint", 2), ("checkpoint", 2), ("autograd", 1)):
        set_backward(model, backward)
        grads, counted = gradients_and_runs(model)
        assert_equal(grads, true)
        assert counted == [runs * 2] * 6 and list(model.state_dict()) == names
    set_backward(model, "checkpoint")
    with torch.no_grad():
        model(torch.zeros(2, 4))


@pytest.mark.parametrize(
    ("model", "backward", "words"),
    [
        (Tower([Block(), Block()]), "reversible", f"Tower has no reversible blocks; only {', '.join(PLAIN)} are possible"),
        (nn.Linear(2, 2), "checkpoint", "Linear has no ModuleList or Sequential of equal blocks to recompute"),
    ],
)
def test_what_cannot_be_is_refused(model, backward, words):
    with pytest.raises(ValueError, match=words):
        set_backward(model, backward)


def test_sequences_of_a_model_of_others():
    model = nn.ModuleList(ReversibleSequence([ReversibleBlock(Block(), Block()) for _ in range(2)]) for _ in range(2))
    set_backward(model, "pareprop", store=3, keep=("attention",))
    kinds = [[schedule.kind for schedule in sequence.schedules] for sequence in model]
    assert kinds == [["rebuilt", "stored"], ["stored", "stored"]] and model[0].schedules[0].keep == ("attention",)
