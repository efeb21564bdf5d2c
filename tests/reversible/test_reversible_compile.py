"""torch.compile of the branches, of the blocks, and of a model around the sequence."""

import gc
from copy import deepcopy
from weakref import ref

import pytest
import torch
from engine_branches import F64, WIDTH
from engine_cases import relative_error, sequence
from torch import nn
from torch._dynamo.utils import counters

from holotrain.models.layers.blocks import transformer_branches
from holotrain.reversible import ReversibleBlock, ReversibleSequence, fused, recording
from holotrain.reversible.block_inputs import WAYS

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


class Counted:
    """Counts recomputations that are fused with their gradients."""

    def __init__(self, monkeypatch):
        self.calls, compiled = 0, fused.compiled_gradients

        def counted(*arguments):
            self.calls += 1
            return compiled(*arguments)

        monkeypatch.setattr(recording, "compiled_gradients", counted)


@pytest.fixture
def fusions(monkeypatch):
    return Counted(monkeypatch)


def branches(depth=2, dropout=0.0):
    torch.manual_seed(0)
    pairs = transformer_branches(8, depth, 2, dropout=dropout)
    return [ReversibleBlock(f.double(), g.double()) for f, g in pairs]


def both(blocks, **options):
    """The same sequence, as it is and with compiled branches."""
    plain, compiled = (ReversibleSequence(deepcopy(blocks), **options) for _ in range(2))
    for block in compiled.blocks:
        block.compile(backend="aot_eager")
    return plain, compiled


def gradients_of(net, tokens=5, needed=True, **keywords):
    torch.manual_seed(1)
    x = torch.randn(2, tokens, 8, dtype=F64, requires_grad=needed)
    y1, y2 = net(x, x + 1, **keywords)
    trained = [each for each in net.parameters() if each.requires_grad]
    return torch.autograd.grad((y1 * y2.sin()).sum(), [x] * needed + trained)


@pytest.mark.parametrize(
    "options",
    [{"backward": "reversible"}, {"backward": "checkpoint8"}, {"exact": 14}, {"backward": "checkpoint", "tile": 2}],
    ids=str,
)
def test_recomputations_and_gradients_are_one_graph(options, fusions):
    plain, compiled = both(branches(), **options)
    for _ in range(3):  # the first one compares the recomputation with the forward
        assert relative_error(gradients_of(compiled, 6), gradients_of(plain, 6)) <= 1e-10
    branches_in_parts = 0 if "exact" in options else 8 if "tile" in options else 4  # a grid needs the same code in both runs
    assert fusions.calls == 2 * branches_in_parts


@pytest.mark.slow
def test_what_has_no_gradient(fusions):
    """Frozen parameters, a frozen branch, and a first input that needs none."""
    blocks = branches()
    blocks[1].f.requires_grad_(False)
    blocks[0].g.norm.requires_grad_(False)
    plain, compiled = both(blocks)
    for needed in (True, False, False, True):
        assert relative_error(gradients_of(compiled, needed=needed), gradients_of(plain, needed=needed)) <= 1e-10
    assert fusions.calls > 0


@pytest.mark.slow
def test_a_graph_is_differentiated_twice(fusions):
    _, compiled = both(branches())
    gradients_of(compiled)
    x = torch.randn(2, 5, 8, dtype=F64, requires_grad=True)
    loss = sum(compiled(x, x)).square().sum()
    first, second = (torch.autograd.grad(loss, x, retain_graph=kept)[0] for kept in (True, False))
    assert torch.equal(first, second) and fusions.calls == 8


@pytest.mark.slow
def test_branches_that_draw_are_not_fused(fusions):
    plain, compiled = both(branches(dropout=0.3))
    for net in (plain, compiled):
        net.eval()
    for _ in range(2):
        assert relative_error(gradients_of(compiled), gradients_of(plain)) <= 1e-10
    fusions.calls = 0
    for net in (plain, compiled):
        net.train()
    for _ in range(2):
        assert relative_error(gradients_of(compiled), gradients_of(plain)) <= 1e-10
    assert fusions.calls == 0


class Opaque(nn.Module):
    """A branch that the compiler cannot take as one graph."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8).double()

    def forward(self, x):
        y = self.linear(x)
        torch._dynamo.graph_break()
        return y.tanh()


@pytest.mark.filterwarnings("default")
def test_a_recomputation_that_is_no_single_graph(fusions):
    plain, compiled = both([ReversibleBlock(Opaque(), Opaque())])
    reference = gradients_of(plain)
    gradients_of(compiled)
    with pytest.warns(UserWarning, match="Opaque cannot be compiled with its gradients"):
        assert relative_error(gradients_of(compiled), reference) <= 1e-10
    calls = fusions.calls
    assert relative_error(gradients_of(compiled), reference) <= 1e-10 and fusions.calls == calls


@pytest.mark.slow
def test_lengths_are_not_compiled_each(fusions):
    _, compiled = both(branches())
    gradients_of(compiled)
    counters.clear()
    for tokens in (5, 6, 7, 8, 9, 10):
        gradients_of(compiled, tokens)
    first = counters["stats"]["unique_graphs"]
    for tokens in (11, 12, 13):
        gradients_of(compiled, tokens)
    assert counters["stats"]["unique_graphs"] == first


@pytest.mark.slow
def test_changes_between_forward_and_backward_are_noticed(fusions):
    _, compiled = both(branches())
    gradients_of(compiled)
    x = torch.randn(2, 5, 8, dtype=F64, requires_grad=True)
    loss = compiled(x, x)[0].sum()
    with torch.no_grad():
        compiled.blocks[0].f.norm.weight.add_(1)
    with pytest.raises(RuntimeError, match="was changed between the forward"):
        loss.backward()
    assert fusions.calls > 0


@pytest.mark.slow
def test_half_precision(fusions):
    """Autocast is that of the forward, also in the backward."""
    plain, compiled = (net.float() for net in both(branches()))
    for _ in range(2):
        found = []
        for net in (plain, compiled):
            torch.manual_seed(1)
            x = torch.randn(2, 5, 8, requires_grad=True)
            with torch.autocast("cpu", torch.bfloat16):
                y1, y2 = net(x, x)
            found.append(torch.autograd.grad((y1 * y2).sum(), [x, *net.parameters()]))
        assert relative_error(*found) <= 1e-2
    assert fusions.calls == 4


class Elsewhere(nn.Module):
    """A branch whose factor is no parameter of its own, and whose layer can be chosen."""

    def __init__(self, factor):
        super().__init__()
        self.layers, self.chosen = nn.ModuleList(nn.Linear(8, 8).double() for _ in range(2)), 0
        self.factor = [factor]

    def forward(self, x):
        return self.layers[self.chosen](x).tanh() * self.factor[0]


@pytest.mark.parametrize("of_leaf", [True, False])
def test_a_branch_of_others_parameters_is_not_fused(of_leaf, fusions):
    leaf = torch.ones(8, dtype=F64, requires_grad=True)
    _, compiled = both([ReversibleBlock(Elsewhere(None), Elsewhere(None))], backward="checkpoint")
    found = []
    for _ in range(3):
        for branch in (compiled.blocks[0].f, compiled.blocks[0].g):
            branch.factor[0] = leaf if of_leaf else leaf.exp()
        x = torch.linspace(-1, 1, 16, dtype=F64).view(2, 8)
        found.append(torch.autograd.grad(sum(compiled(x, x + 1)).square().sum(), leaf, allow_unused=True)[0])
    assert torch.equal(found[1], found[0]) and torch.equal(found[2], found[0]) and fusions.calls == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_fused_branch_that_changes_before_the_backward_says_so(fusions):
    _, compiled = both([ReversibleBlock(Elsewhere(2.0), Elsewhere(2.0))], backward="checkpoint")
    x = torch.ones(2, 8, dtype=F64, requires_grad=True)
    for _ in range(4):  # of the runs 1, 2 and 4 all branches are compared in any case
        sum(compiled(x, x)).sum().backward()
    loss = sum(compiled(x, x)).sum()
    compiled.blocks[0].f.chosen = 1
    with pytest.warns(UserWarning, match="Elsewhere.chosen was 0 before the forward and is 1 in the backward"):
        loss.backward()
    assert fusions.calls > 0


@pytest.mark.slow
def test_a_loss_keeps_nothing_of_fused_branches_after_its_backward(fusions, monkeypatch):
    _, compiled = both(branches(), backward="checkpoint")
    gradients_of(compiled)
    kept = []

    def keeps(x, way=WAYS["checkpoint"]):
        found = way(x)
        kept.append(ref(found))
        return found

    monkeypatch.setitem(WAYS, "checkpoint", keeps)
    x = torch.randn(2, 5, 8, dtype=F64, requires_grad=True)
    loss = sum(compiled(x, x)).square().sum()
    loss.backward()
    gc.collect()  # of the compiler's own exceptions
    assert fusions.calls == 4 and len(kept) == 4 and not any(each() for each in kept)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()
