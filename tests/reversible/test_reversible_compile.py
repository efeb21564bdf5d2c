"""torch.compile of the branches, of the blocks, and of a model around the sequence."""

import warnings

import pytest
import torch
from covering import thinned
from torch import nn

from holotrain.reversible import ReversibleBlock, ReversibleSequence

WIDTH = 8


class Branch(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.inner, self.outer, self.dropout = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.outer(self.dropout(torch.tanh(self.inner(x)))))


class Model(nn.Module):
    def __init__(self, backward, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(WIDTH, WIDTH)
        blocks = [ReversibleBlock(Branch(dropout), Branch(dropout)) for _ in range(3)]
        self.sequence = ReversibleSequence(blocks, backward)
        self.double()

    def forward(self, x):
        x = torch.tanh(self.stem(x)) * 2
        y1, y2 = self.sequence(x, x + 1)
        return (y1 * torch.sin(y2)).sum()


def compile_branches(model, **options):
    for block in model.sequence.blocks:
        block.f.compile(**options)
        block.g.compile(**options)
    return model


def compile_blocks(model, **options):
    for block in model.sequence.blocks:
        block.compile(**options)
    return model


def compile_whole(model, **options):
    return torch.compile(model, **options)


def gradients(run, model):
    x = torch.linspace(-1, 1, 6 * WIDTH, dtype=torch.float64).view(6, WIDTH)
    torch.manual_seed(3)
    return torch.autograd.grad(run(x), list(model.parameters()))


def error(ours, true) -> float:
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, true, strict=True))


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("compiled", "backward"),
    thinned(
        [compile_branches, compile_blocks, compile_whole],
        ["checkpoint", "reversible", "pareprop"],
        keep=[(compile_blocks, "checkpoint"), (compile_branches, "reversible"), (compile_whole, "pareprop")],
    ),
)
def test_compiled_gradients_equal_plain_autograds(compiled, backward):
    plain = Model("autograd")
    reference = gradients(plain, plain)
    model = Model(backward)
    run = compiled(model, backend="aot_eager")
    for _ in range(2):  # compiled, and from the cache
        assert error(gradients(run, model), reference) <= 1e-10


@pytest.mark.parametrize("backward", ["reversible", "pareprop"])
def test_dropout_in_compiled_branches_is_the_same_in_both_runs(backward, compiler):
    """The compiler's own random numbers: the recomputation must draw what the forward drew."""
    reference = compile_branches(Model("autograd", dropout=0.3))
    model = compile_branches(Model(backward, dropout=0.3))
    true = gradients(reference, reference)
    assert error(gradients(model, model), true) <= 1e-10


def test_one_graph_of_the_whole_model():
    """Checkpointed blocks become part of it; of rebuilt ones the error says what to do."""
    plain = Model("autograd")
    run = torch.compile(model := Model("checkpoint"), backend="aot_eager", fullgraph=True)
    assert error(gradients(run, model), gradients(plain, plain)) <= 1e-10
    run = torch.compile(model := Model("reversible"), backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile without fullgraph=True, or each block with"):
        gradients(run, model)
