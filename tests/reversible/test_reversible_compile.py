"""torch.compile of the branches, of the blocks, and of a model around the sequence."""

import pytest
import torch
from engine_branches import F64, WIDTH
from engine_cases import relative_error, sequence
from torch import nn
from torch._dynamo.utils import counters

pytestmark = pytest.mark.filterwarnings("ignore")


class Model(nn.Module):
    def __init__(self, backward, dropout=0.0):
        super().__init__()
        self.sequence = sequence(3, dropout, backward=backward)
        self.stem = nn.Linear(WIDTH, WIDTH).double()

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
    x = torch.linspace(-1, 1, 6 * WIDTH, dtype=F64).view(6, WIDTH)
    torch.manual_seed(3)
    return torch.autograd.grad(run(x), list(model.parameters()))


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("compiled", "backward"), [(compile_blocks, "checkpoint"), (compile_branches, "reversible"), (compile_whole, "pareprop")]
)
def test_compiled_gradients_equal_plain_autograds(compiled, backward):
    plain, model = Model("autograd"), Model(backward)
    reference, run = gradients(plain, plain), compiled(model, backend="aot_eager")
    counters.clear()
    for _ in range(2):  # compiled, and from the cache
        assert relative_error(gradients(run, model), reference) <= 1e-10
    assert counters["stats"]["unique_graphs"] > 0


def test_dropout_in_compiled_branches_is_the_same_in_both_runs(compiler):
    """The compiler's own random numbers: the recomputation must draw what the forward drew."""
    plain, model = (compile_branches(Model(backward, dropout=0.3)) for backward in ("autograd", "reversible"))
    assert relative_error(gradients(model, model), gradients(plain, plain)) <= 1e-10


def test_one_graph_of_the_whole_model():
    """Checkpointed blocks become part of it; of rebuilt ones the error says what to do."""
    plain, model = Model("autograd"), Model("checkpoint")
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert relative_error(gradients(run, model), gradients(plain, plain)) <= 1e-10
    run = torch.compile(model := Model("reversible"), backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile without fullgraph=True, or each block with"):
        gradients(run, model)
