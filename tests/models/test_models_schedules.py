"""Schedules of models that know nothing of holotrain, every family compiled block by block, and memory by depth."""

import pytest
import torch
from compared import assert_equal
from covering import slow
from small_models import FAMILIES, TRANSFORMERS, example
from torch import nn
from tracked_memory import bytes_of_a_step

from holotrain import models
from holotrain.models.block_schedules import compile_blocks, set_backward
from holotrain.models.saved import build


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


CASES = [(name, {}) for name in TRANSFORMERS if name.startswith("Rev") and name != "RevSwin"]
CASES += [("GPT", {}), ("RoBERTa", {}), ("RevSwin", {"backward": "pareprop"})]
QUICK = [("RevViT", {}), ("RoBERTa", {})]
MODELS = [pytest.param(*case, marks=() if case in QUICK else pytest.mark.long) for case in CASES]


@pytest.mark.parametrize(("name", "options"), MODELS, ids=str)
def test_gradients_are_those_of_the_model_as_it_is(name, options):
    """With the eager backend: what is traced and where, not what a code generator makes of it."""
    arguments = FAMILIES[name.removeprefix("Rev")] | {"dropout": 0.0} | options
    grads, traced = [], []
    for compiled in (False, True):
        torch.manual_seed(0)
        torch.compiler.reset()
        model = build(f"holotrain.models.{name}", arguments).double()
        if compiled:
            compile_blocks(model, backend=lambda graph, inputs: traced.append(graph) or graph.forward)
        model(example(name, dtype=torch.float64)).square().sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert traced, "nothing was compiled"
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-9, atol=1e-12)
    assert not any("_orig_mod" in name for name in model.state_dict())


PIXELS = {"image_size": 16, "channels": 1, "classes": 3}
TEXT = {"vocab": 30, "context": 32, "dim": 16, "heads": 2}
PATCHES = PIXELS | {"patch_size": 2, "dim": 16, "heads": 2}
WINDOWS = PATCHES | {"dim": 8, "heads": (1, 2), "window": 4}
POOLED = PIXELS | {"image_size": 32, "dim": 8}
OF_DEPTH = {
    "vit": ("ViT", lambda depth: PATCHES | {"depth": depth}),
    "swin": ("Swin", lambda depth: WINDOWS | {"depths": (depth, 1)}),
    "mvit, first stage": ("MViT", lambda depth: POOLED | {"depths": (depth, 1)}),
    "mvit, second stage": ("MViT", lambda depth: POOLED | {"depths": (1, depth + 1)}),
    "gpt": ("GPT", lambda depth: TEXT | {"depth": depth}),
    "roberta": ("RoBERTa", lambda depth: TEXT | {"depth": depth}),
    "roberta, classes": ("RoBERTa", lambda depth: TEXT | {"depth": depth, "classes": 3}),
}


def step_of(name, arguments):
    model = getattr(models, name)(**arguments)
    if "image_size" in arguments:
        return bytes_of_a_step(model, torch.randn(16, 1, arguments["image_size"], arguments["image_size"]))
    mask = () if "GPT" in name else (torch.arange(32) < torch.randint(8, 33, (16, 1)),)
    return bytes_of_a_step(model, torch.randint(30, (16, 32)), *mask)


def growth(name, arguments_of, **options):
    """Bytes that a step needs more with 12 blocks than with 4: at its peak, and between forward and backward."""
    found = []
    for depth in (4, 12):
        torch.manual_seed(0)
        found.append(step_of(name, arguments_of(depth) | options))
    return [more - less for less, more in zip(*found, strict=True)]


@pytest.mark.parametrize("family", [name if name in ("swin", "gpt") else slow(name) for name in OF_DEPTH])
def test_activations_do_not_grow_with_depth(family):
    name, arguments_of = OF_DEPTH[family]
    grown = growth(name, arguments_of, drop_path=0.1)
    assert min(grown) > 8 * 16 * 4 * 64 * 8  # 8 blocks, 16 samples: some maps of tokens each
    for backward in ("reversible", "pareprop"):
        for more, less in zip(growth(f"Rev{name}", arguments_of, backward=backward, drop_path=0.1), grown, strict=True):
            assert more <= 0.02 * less
