"""Branches that an engine cannot see through: each is differentiated as plain autograd does, or refused in a sentence. Settings
of libraries that a recomputation has as its forward had them: attention, convolutions.

Each of these gave silently wrong gradients in an engine that differentiates a call which it makes itself.
"""

import random

import numpy as np
import pytest
import torch
from compared import assert_equal
from covering import paired
from engine_branches import F64, WIDTH, Branch
from engine_cases import ENGINES, learned, loss_of, relative_error, sequence, streams
from paper_gpu import paper_gpu
from torch import nn
from torch.backends import cuda as kernels
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from holotrain.reversible import ReversibleBlock, ReversibleSequence
from holotrain.reversible.context import recomputing

RECOMPUTING = ("checkpoint", "reversible")
every_engine = pytest.mark.parametrize("engine", ["checkpoint", "reversible", "a schedule a block"])
recomputing_engines = pytest.mark.parametrize("engine", RECOMPUTING)


def gradients(net, **keywords):
    net.zero_grad()
    loss_of(net, **keywords).backward()
    return [parameter.grad for parameter in net.parameters()]


def both(engine, make_branch):
    """The same sequence under plain autograd and in an engine."""
    return [sequence(4, branch=lambda dropout: make_branch(), engine=each) for each in (None, ENGINES[engine])]


def assert_same(engine, make_branch, run=gradients):
    expected, found = map(run, both(engine, make_branch))
    assert relative_error(found, expected) <= 1e-12


class Reading(nn.Module):
    """Reads a tensor that is none of its parameters."""

    def __init__(self, read):
        super().__init__()
        self.inner, self.read = nn.Linear(WIDTH, WIDTH), read

    def forward(self, x, holder=None):
        return torch.tanh(self.inner(x)) * (self.read() if holder is None else holder.scale)


@every_engine
@pytest.mark.parametrize("way", ["closure", "attribute", "list", "keyword"])
def test_a_tensor_that_the_engine_is_not_told_of(engine, way):
    found = []
    for each in (None, ENGINES[engine]):
        scale = torch.linspace(0.5, 1, WIDTH, dtype=F64).requires_grad_()
        kept = [scale.exp()]

        def branch(scale=scale, kept=kept):
            module = Reading(lambda: scale.exp() if way == "closure" else module.other if way == "attribute" else kept[0])
            module.other = scale.exp()
            return module

        holder = nn.Linear(1, 1)
        holder.scale = nn.Parameter(scale.detach().clone())
        keywords = {name: {"holder": holder} for name in ("f_kwargs", "g_kwargs")} if way == "keyword" else {}
        net = sequence(4, branch=lambda dropout: branch(), engine=each)
        read = holder.scale if way == "keyword" else scale
        found.append(torch.autograd.grad(loss_of(net, **keywords), [read, *net.parameters()]))
    assert relative_error(found[1], found[0]) <= 1e-12


class Reentrant(Branch):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


@every_engine
def test_a_reentrant_checkpoint_within_a_branch(engine):
    assert_same(engine, Reentrant)


@every_engine
def test_functional_call(engine):
    """The parameters are other tensors in the forward, and the module's own again in the backward."""

    def run(net):
        leaves = {name: (2 * p.detach()).requires_grad_() for name, p in net.named_parameters()}
        y1, y2 = torch.func.functional_call(net, {name: leaf * 1.5 for name, leaf in leaves.items()}, streams())
        grads = torch.autograd.grad((y1 * y2.sin()).sum(), list(leaves.values()))
        assert all(isinstance(p, nn.Parameter) for p in net.parameters())
        return [*grads]

    assert_same(engine, Branch, run)


@recomputing_engines
def test_parameters_replaced_before_the_backward(engine):
    """Gradients belong to the tensors that the forward read, also if others, or none, stand in their place by then."""
    plain, net = both(engine, lambda: Reading(lambda: 1.0))
    loss_of(plain).backward()
    loss, branch = loss_of(net), net.blocks[1].f
    old = branch.inner
    branch.inner = new = nn.Linear(WIDTH, WIDTH, dtype=F64)
    net.blocks[2].g.other = nn.Parameter(torch.ones(1))
    weight = net.blocks[0].g.inner.weight
    del net.blocks[0].g.inner.weight
    net.blocks[0].g.inner.weight = nn.Parameter(torch.zeros_like(weight))
    del net.blocks[3].g.inner
    loss.backward()
    assert branch.inner is new and new.weight.grad is None and not hasattr(net.blocks[3].g, "inner")
    assert net.blocks[0].g.inner.weight.abs().sum() == 0
    found = [old.weight.grad, net.blocks[0].f.inner.weight.grad, weight.grad]
    expected = [plain.blocks[1].f.inner.weight.grad, *(getattr(plain.blocks[0], name).inner.weight.grad for name in "fg")]
    assert relative_error(found, expected) < 1e-12


class Parametrized(Branch):
    """Reads the weight twice."""

    def __init__(self):
        super().__init__()
        parametrize.register_parametrization(self.inner, "weight", nn.Softplus())

    def forward(self, x):
        return super().forward(x + super().forward(x))


class Counting(Branch):
    """Another function each time."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) if self.calls % 2 else super().forward(x).sin()


class EditsWhatWasSaved(Branch):
    def forward(self, x):
        hidden = torch.tanh(self.inner(x))
        result = self.outer(hidden)
        hidden.add_(1)
        return result


class EditsItsKeyword(Branch):
    """From its second run on."""

    runs = 0

    def forward(self, x, scale):
        result = super().forward(x, scale=scale)
        self.runs += 1
        if self.runs == 2:
            scale[0] = 2.0
        return result


class Prompt:
    """What a branch reads."""

    def __init__(self):
        self.value = learned(1, WIDTH)


def stepped(prompt):
    with torch.no_grad():
        prompt.value.mul_(0.5)


def replaced(other):
    return lambda prompt: setattr(prompt, "value", other)


def of_prompt(change):
    prompt = Prompt()
    return lambda: Reading(lambda: prompt.value), lambda net: change(prompt)


def swap_data(net):
    for _ in range(2):  # the second could lie where the first did
        bias = net.blocks[0].f.inner.bias
        bias.data = bias.data * 0.9


OTHER, INPLACE = "did something else", "modified by an inplace operation"
SWAPPED = "changed between the forward and its recomputation"


def nothing(net):
    pass


REFUSED = {
    "another shape": (lambda: of_prompt(replaced(torch.ones(1, dtype=F64))), OTHER),
    "another dtype": (lambda: of_prompt(replaced(torch.ones(WIDTH))), OTHER),
    "a closure that is stepped": (lambda: of_prompt(stepped), INPLACE),
    "data swapped": (lambda: (Branch, swap_data), SWAPPED),
    "another function each time": (lambda: (Counting, nothing), OTHER),
    "a saved tensor that is edited": (lambda: (EditsWhatWasSaved, nothing), INPLACE),
}


@recomputing_engines
@pytest.mark.parametrize("name", REFUSED)
def test_what_changes_before_the_backward_is_refused(engine, name):
    made, words = REFUSED[name]
    make_branch, change = made()
    _, net = both(engine, make_branch)
    if name == "another shape":
        gradients(net)  # also after recomputations that did as their forward
    loss = loss_of(net)
    change(net)
    with pytest.raises(RuntimeError, match=words):
        loss.backward()


@pytest.mark.parametrize(("engine", "make"), paired(RECOMPUTING, [np.full, torch.full]))
def test_a_keyword_argument_that_a_branch_edits_is_refused(engine, make):
    class Editing(EditsItsKeyword):
        runs = 1 if make is np.full else 0

    scale = make((1,), 0.5)
    _, net = both(engine, Branch)
    net.blocks[2].f = Editing().double()
    with pytest.raises((RuntimeError, ValueError), match="modified by an inplace operation|changed"):
        for _ in range(2):
            loss_of(net, f_kwargs={"scale": scale}).backward()


@every_engine
def test_parametrized_weights_that_are_cached_are_refused(engine):
    """The recomputation cannot find what the forward found in the cache."""
    with parametrize.cached():
        loss = loss_of(both(engine, Parametrized)[1])
    with pytest.raises(RuntimeError, match=OTHER):
        loss.backward()


class Drawing(Branch):
    """Draws numbers that are not torch's; a seed that it sets itself repeats them."""

    def __init__(self, draw, seed=None):
        super().__init__()
        self.draw, self.seed, self.own = draw, seed, np.random.default_rng(5)

    def forward(self, x):
        if self.seed is not None:
            np.random.seed(self.seed)
        return super().forward(x) * self.draw(self)


DRAWS = {
    "Python": lambda branch: random.random(),
    "NumPy": lambda branch: np.random.rand(),
    "a generator of its own": lambda branch: branch.own.random(),
}


@recomputing_engines
@pytest.mark.parametrize("name", DRAWS)
def test_a_branch_that_draws_numbers_of_python_or_numpy_is_named(engine, name):
    _, net = both(engine, Branch)
    net.blocks[2].g = Drawing(DRAWS[name]).double()
    loss = loss_of(net)
    with pytest.raises(RuntimeError, match=r"block 2\.g draws from Python's or NumPy's random numbers"):
        loss.backward()


@every_engine
def test_a_branch_that_seeds_what_it_draws(engine):
    assert_same(engine, lambda: Drawing(DRAWS["NumPy"], seed=3))


@recomputing_engines
def test_a_branch_that_seeds_what_it_draws_last_may_run_again_more_than_once(engine):
    """A second replay stops when all is saved, before the last draw."""

    class DrawsLast(Branch):
        def forward(self, x):
            random.seed(3)
            return super().forward(x) + random.random()

    def twice(net):
        loss = loss_of(net) + loss_of(net)
        return [
            *torch.autograd.grad(loss, [*net.parameters()], retain_graph=True),
            *torch.autograd.grad(loss, net.parameters()),
        ]

    assert_same(engine, DrawsLast, twice)


class Switched(nn.Module):
    """Reads one of two tensors of equal shape, which it holds without a gradient, or which a list holds."""

    def __init__(self, kind):
        super().__init__()
        self.scale, self.kind, self.active = nn.Parameter(torch.ones(8)), kind, 0
        weights = [torch.full((8, 8), 0.1 * number, dtype=F64) for number in (1, 2)]
        self.foreign = [nn.Parameter(each) for each in weights]
        for number, each in enumerate(weights):
            if kind == "buffer":
                self.register_buffer(f"weight{number}", each)
            else:
                setattr(self, f"weight{number}", nn.Parameter(each, requires_grad=False))

    def forward(self, x):
        weight = self.foreign[self.active] if self.kind == "foreign" else getattr(self, f"weight{self.active}")
        return (x * self.scale) @ (weight.view(8, 8) if self.kind == "view" else weight)


@recomputing_engines
@pytest.mark.parametrize("kind", ["frozen", "view", "buffer", "foreign"])
def test_another_weight_of_the_same_shape_is_refused(engine, kind):
    _, net = both(engine, lambda: Switched(kind).double())
    for _ in range(2):  # in the first step more is compared
        gradients(net)
    loss = loss_of(net)
    net.blocks[1].g.active = 1
    with pytest.raises(RuntimeError, match="read other parameters in the recomputation"):
        loss.backward()


class LateWriter(Branch):
    """Its buffer changes the result, and is changed by the forward from some step on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones((), dtype=F64))
        self.writes = False

    def forward(self, x):
        if self.writes:
            self.scale.mul_(0.5)
        return super().forward(x) * self.scale


@recomputing_engines
def test_a_branch_that_begins_to_write_a_buffer_is_refused_once(engine):
    reference, net = both(engine, LateWriter)
    gradients(net)
    for each in (reference, net):
        each.blocks[1].f.writes = True
    loss = loss_of(net)
    with pytest.raises(RuntimeError, match="buffer"):
        loss.backward()
    reference.load_state_dict(net.state_dict())
    assert relative_error(gradients(net), gradients(reference)) <= 1e-12
    assert_equal(list(net.buffers()), list(reference.buffers()))


@recomputing_engines
def test_a_recomputation_that_fails_leaves_everything_as_it_was(engine):
    class Failing(Branch):
        def forward(self, x, **keywords):
            if torch.is_grad_enabled() and recomputing():
                random.random()  # which it did not do in the forward
                raise KeyboardInterrupt
            return super().forward(x, **keywords)

    _, net = both(engine, Failing)
    loss_of(net)  # what it draws is known from here on
    own = {name: torch.full_like(value, 0.5) for name, value in net.named_parameters()}
    y1, _ = torch.func.functional_call(net, own, streams())
    before = dict(net.named_parameters())
    with pytest.raises(KeyboardInterrupt):
        y1.sum().backward()
    assert all(value is before[name] for name, value in net.named_parameters()) and not recomputing()


# Settings of libraries and of the process, which a recomputation has as its forward had them.

CUDNN, FLASH, EFFICIENT, MATH, OVERRIDEABLE = 3, 1, 2, 0, 4
PRIORITIES = torch._C._get_sdp_priority_order  # nothing public reads it


def put_cudnn_first():
    torch._C._set_sdp_priority_order([CUDNN, FLASH, EFFICIENT, MATH, OVERRIDEABLE])


CHANGES = {
    "order of attention": (put_cudnn_first, lambda: PRIORITIES()[0] == CUDNN),
    "flash attention": (lambda: kernels.enable_flash_sdp(False), lambda: not kernels.flash_sdp_enabled()),
    "cuDNN's attention": (lambda: kernels.enable_cudnn_sdp(False), lambda: not kernels.cudnn_sdp_enabled()),
    "default dtype": (lambda: torch.set_default_dtype(F64), lambda: torch.get_default_dtype() == F64),
}
"""What the first use of an operator may change, and whether it has."""


@pytest.fixture
def restored_settings():
    order = PRIORITIES()
    yield
    torch.set_default_dtype(torch.float32)
    torch._C._set_sdp_priority_order(order)
    kernels.enable_flash_sdp(True)
    kernels.enable_cudnn_sdp(True)


class Settings(nn.Module):
    """Notes what the library that computes it is told: in which order attention's kernels, which dtype."""

    def __init__(self):
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.ones(4)), []

    def forward(self, x):
        self.seen.append((PRIORITIES()[0], torch.get_default_dtype()))
        return (x * self.weight).sin()


@recomputing_engines
def test_libraries_choose_in_the_recomputation_as_in_the_forward(engine, restored_settings):
    branch = Settings()
    net = ReversibleSequence([ReversibleBlock(branch, branch)], engine)
    before = PRIORITIES()
    torch.set_default_dtype(F64)
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        y1, y2 = net(*torch.rand(2, 2, 4, dtype=torch.float32))
    torch.set_default_dtype(torch.float32)
    (y1 * y2).sum().backward()
    assert branch.seen == [(SDPBackend.MATH.value, F64)] * 4
    assert torch.get_default_dtype() == torch.float32 and PRIORITIES() == before


@recomputing_engines
def test_no_convolution_is_chosen_by_a_race(engine, monkeypatch):
    """Each thread would have one of its own."""
    seen, cudnn = [], torch.backends.cudnn
    monkeypatch.setattr(cudnn, "benchmark", True)
    branch = nn.Linear(4, 4)
    branch.register_forward_hook(lambda *_: seen.append((cudnn.benchmark, cudnn.deterministic)))
    with paper_gpu(monkeypatch):
        net = ReversibleSequence([ReversibleBlock(branch, branch)], engine).to("cuda")
        sum(net(*torch.rand(2, 2, 4).to("cuda"))).sum().backward()
    assert seen == [(False, True)] * 4 and cudnn.benchmark


class FirstUse(nn.Module):
    """The first one that runs changes a setting, as attention does on Hopper. Each kernel saves tensors of its own."""

    def __init__(self, changes, kernel):
        super().__init__()
        self.inner, self.changes, self.kernel = nn.Linear(WIDTH, WIDTH, dtype=F64), changes, kernel

    def forward(self, x):
        if self.changes:
            self.changes.pop()()
        hidden = self.inner(x)
        return x + (hidden.sin() * hidden.cos() if self.kernel() else hidden.exp()) / 4


@pytest.mark.parametrize(("way", "change"), paired(["reversible", "checkpoint", "pareprop"], [*CHANGES]))
def test_the_first_use_of_an_operator_may_change_a_setting(way, change, restored_settings):
    change, kernel = CHANGES[change]

    def gradients(backward, *changes):
        changes = [*changes]
        torch.manual_seed(0)
        blocks = [FirstUse(changes, kernel) for _ in range(6)]
        net = ReversibleSequence([ReversibleBlock(*blocks[at : at + 2]) for at in (0, 2, 4)], backward)
        return torch.autograd.grad(loss_of(net), list(net.parameters()))

    ours = gradients(way, change)
    assert kernel()
    assert relative_error(ours, gradients("autograd")) <= 1e-12  # all of it as after the change


def test_each_branch_keeps_the_settings_with_which_it_has_run(restored_settings):
    def gradients(backward):
        kernels.enable_flash_sdp(True)
        torch.manual_seed(0)
        changes = [[], [lambda: kernels.enable_flash_sdp(False)], [], []]  # by the second of four branches
        branches = [FirstUse(each, kernels.flash_sdp_enabled) for each in changes]
        net = ReversibleSequence([ReversibleBlock(*branches[:2]), ReversibleBlock(*branches[2:])], backward)
        return torch.autograd.grad(loss_of(net), list(net.parameters()))

    assert relative_error(gradients("checkpoint"), gradients("autograd")) <= 1e-12
