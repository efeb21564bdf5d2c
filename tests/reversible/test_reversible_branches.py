"""Branches that an engine cannot see through: each is differentiated as plain autograd does, or refused in a sentence.

Each of these gave silently wrong gradients in an engine that differentiates a call which it makes itself.
"""

import random

import numpy as np
import pytest
import torch
from compared import assert_equal
from covering import paired
from engine_cases import ENGINES, F64, WIDTH, Branch, relative_error, sequence
from torch import nn
from torch.backends import cuda as kernels
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from holotrain.reversible import ReversibleBlock, ReversibleSequence, make_reversible, recomputation, recomputing, replay
from holotrain.reversible.grid import FixedPointGrid

RECOMPUTING = ("checkpoint", "reversible", "pareprop")
EVERY = ("reversible", "pareprop", "a schedule a block")
"""The last one has blocks of four kinds, one of which keeps its products."""


def engines(names, **options):
    """Every engine at least once, and every value of an option."""
    cases = paired([*map(ENGINES.get, names)], *options.values())
    return pytest.mark.parametrize(("engine", *options), cases)


every_engine, recomputing_engines = engines(EVERY), engines(RECOMPUTING)


def streams():
    return torch.linspace(-1, 1, 12 * WIDTH, dtype=F64).view(2, 2, 3, WIDTH).requires_grad_().unbind()


def loss_of(net, **keywords):
    y1, y2 = net(*streams(), **keywords)
    return (y1 * y2.sin()).sum()


def gradients(net, **keywords):
    net.zero_grad()
    loss_of(net, **keywords).backward()
    return [parameter.grad for parameter in net.parameters()]


def both(engine, make_branch):
    """The same sequence under plain autograd and in an engine."""
    return [sequence(4, branch=lambda dropout: make_branch(), engine=each) for each in (None, engine)]


def assert_same(engine, make_branch, run=gradients):
    """``run`` returns gradients, or a tuple of gradients and what else must be equal."""
    expected, found = map(run, both(engine, make_branch))
    if isinstance(expected, tuple):
        (expected, *others), (found, *rest) = expected, found
        assert rest == others
    assert relative_error(found, expected) <= 1e-12


def assert_refused(net, words, change=lambda: None, **keywords):
    """In the backward, after ``change``."""
    loss = loss_of(net, **keywords)
    change()
    with pytest.raises(RuntimeError, match=words):
        loss.backward()


class AsksForTheMode(Branch):
    """In inference nothing of this would be needed."""

    def forward(self, x):
        return super().forward(x) * (2.0 if torch.is_grad_enabled() else 1.0)


class Reentrant(Branch):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


class ReadsItsSavedTensorsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[1], (grad * ctx.saved_tensors[0]).sum((0, 1))


class OwnFunction(Branch):
    def forward(self, x):
        return super().forward(ReadsItsSavedTensorsTwice.apply(x, self.norm.weight))


class LateParameter(Branch):
    """Registers a parameter and a submodule as it first runs."""

    def forward(self, x):
        if not hasattr(self, "scale"):
            self.scale, self.act = nn.Parameter(torch.full((WIDTH,), 2.0, dtype=F64)), nn.Tanh()
        return self.act(super().forward(x)) * self.scale


@pytest.mark.parametrize("branch", [AsksForTheMode, Reentrant, OwnFunction, LateParameter])
@every_engine
def test_gradients_equal_those_of_plain_autograd(engine, branch):
    assert_same(engine, branch)


class Reading(nn.Module):
    """Reads a tensor that is none of its parameters."""

    def __init__(self, read):
        super().__init__()
        self.inner, self.read = nn.Linear(WIDTH, WIDTH), read

    def forward(self, x, holder=None):
        return torch.tanh(self.inner(x)) * (self.read() if holder is None else holder.scale)


class Holder:
    def __init__(self, scale):
        self.scale = scale


@engines(EVERY, way=["closure", "attribute", "list", "object in a keyword argument", "module in a keyword argument"])
def test_a_tensor_that_is_no_parameter_of_the_branch(engine, way):
    found = []
    for each in (None, engine):
        scale = torch.linspace(0.5, 1, WIDTH, dtype=F64).requires_grad_()
        values = [scale.exp()]

        def branch(scale=scale, values=values):
            module = Reading(lambda: scale.exp() if way == "closure" else module.other if way == "attribute" else values[0])
            module.other = scale.exp()
            return module

        keywords = {}
        if "keyword" in way:
            holder = Holder(scale.exp()) if "object" in way else nn.Linear(1, 1)
            holder.scale = scale.exp() if "object" in way else nn.Parameter(scale.detach().clone())
            scale = scale if "object" in way else holder.scale
            keywords = {"f_kwargs": {"holder": holder}, "g_kwargs": {"holder": holder}}
        net = sequence(4, branch=lambda dropout: branch(), engine=each)
        found.append(torch.autograd.grad(loss_of(net, **keywords), [scale, *net.parameters()]))
    assert relative_error(found[1], found[0]) <= 1e-12


@engines(RECOMPUTING, other=[torch.ones(1, dtype=F64), torch.ones(WIDTH)])
def test_a_tensor_of_another_shape_or_dtype_in_the_recomputation_is_refused(engine, other):
    """Also after recomputations that did as their forward."""
    gain = torch.full((WIDTH,), 2.0, dtype=F64)
    _, net = both(engine, lambda: Reading(lambda: gain))
    gradients(net)
    loss, gain = loss_of(net), other
    with pytest.raises(RuntimeError, match="so it did something else"):
        loss.backward()


class Projecting(Reading):
    def forward(self, x):
        return torch.tanh(self.inner(x)) @ self.read().T  # saved is the transpose


@pytest.mark.parametrize(("kind", "rows"), [(Reading, 1), (Projecting, WIDTH)])
@every_engine
def test_a_tensor_of_a_closure_that_is_stepped_before_the_backward_is_refused(kind, rows, engine):
    """As plain autograd refuses it: the tensor is saved, but it is no parameter of the branch."""
    prompt = torch.linspace(0.5, 1, WIDTH, dtype=F64).expand(rows, WIDTH).clone().requires_grad_()
    for net in both(engine, lambda: kind(lambda: prompt)):
        assert_refused(net, "modified by an inplace operation", lambda: halve(prompt))


def halve(tensor):
    with torch.no_grad():
        tensor.mul_(0.5)


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
def test_a_parameter_replaced_before_the_backward(engine):
    """Its gradient belongs to the tensor that the forward read."""

    def run(net):
        parameters, loss, inner = list(net.parameters()), loss_of(net), net.blocks[1].f.inner
        inner.bias = nn.Parameter(torch.zeros_like(inner.bias))
        grads = torch.autograd.grad(loss, parameters)
        assert inner.bias.abs().sum() == 0
        return [*grads]

    assert_same(engine, Branch, run)


@engines(RECOMPUTING, name=["weight", "bias", "weight", "bias"], times=[1, 1, 2, 2])
def test_data_swapped_before_the_backward_are_refused(engine, name, times):
    def swap():
        for _ in range(times):  # the second could lie where the first did
            parameter = getattr(net.blocks[0].f.inner, name)
            parameter.data = parameter.data * 0.9

    _, net = both(engine, Branch)
    assert_refused(net, "changed between the forward and its recomputation", swap)


@pytest.mark.parametrize("how", ["a list", "hooks"])
@every_engine
def test_keyword_arguments_of_each_block(engine, how):
    found = []
    for each in (None, engine):
        net = sequence(4, dropout=0.1, engine=each)
        biases = [torch.full((2 * WIDTH,), 0.1 * i, dtype=F64, requires_grad=True) for i in range(4)]
        f_kwargs = [{"bias": bias, "scale": 0.5 + i} for i, bias in enumerate(biases)]
        torch.manual_seed(3)
        if how == "a list":
            loss = loss_of(net, f_kwargs=f_kwargs)
        else:
            for block, own in zip(net.blocks, f_kwargs, strict=True):
                block.register_forward_pre_hook(lambda module, inputs, own=own: (*inputs[:2], own, *inputs[3:]))
            loss = loss_of(net)
        found.append(torch.autograd.grad(loss, [*biases, *net.parameters()]))
    assert relative_error(found[1], found[0]) <= 1e-12


def test_too_few_keyword_arguments():
    with pytest.raises(ValueError, match="for 2 blocks of 4"):
        loss_of(sequence(4), f_kwargs=[{}, {}])


@engines(RECOMPUTING, make=[np.full, torch.full])
def test_a_keyword_argument_that_a_later_block_edits_is_refused(engine, make):
    scale = make((1,), 0.5)

    class Editing(Branch):
        edits = False

        def forward(self, x, scale=1.0):
            result = super().forward(x, scale=scale)
            if self.edits:
                scale[0] = 2.0
            return result

    _, net = both(engine, Editing)
    net.blocks[2].f.edits = True
    assert_refused(net, "modified by an inplace operation", f_kwargs={"scale": scale})


class Exponential(nn.Module):
    def forward(self, weight):
        return weight.exp() * weight


class Parametrized(Branch):
    def __init__(self):
        super().__init__()
        parametrize.register_parametrization(self.inner, "weight", Exponential())

    def forward(self, x):
        return super().forward(x + super().forward(x))  # reads the weight twice


@every_engine
def test_parametrized_weights_that_are_cached_are_refused(engine):
    """The recomputation cannot find what the forward found in the cache."""
    with parametrize.cached():
        loss = loss_of(both(engine, Parametrized)[1])
    with pytest.raises(RuntimeError, match="did something else"):
        loss.backward()


class Counting(Branch):
    """Another function each time."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) if self.calls % 2 else super().forward(x).sin()


class Routed(nn.Module):
    """Which rows it works on depends on the run."""

    def __init__(self):
        super().__init__()
        self.norm, self.rows = nn.LayerNorm(WIDTH), [2, 1]

    def forward(self, x):
        rows = self.rows.pop(0) if self.rows else 2
        return torch.cat([self.norm(x[:rows]), x[rows:]]) if rows < len(x) else self.norm(x)


@pytest.mark.parametrize("branch", [Counting, Routed])
@recomputing_engines
def test_a_branch_that_saves_other_tensors_in_the_recomputation_is_refused(engine, branch):
    assert_refused(both(engine, branch)[1], "did something else")


@every_engine
def test_a_backward_in_inference_mode(engine):
    def run(net):
        loss = loss_of(net)
        with torch.inference_mode():
            loss.backward()
        return [p.grad for p in net.parameters()]

    assert_same(engine, Branch, run)


@recomputing_engines
def test_a_sequence_within_a_branch_of_a_sequence(engine):
    """Two levels down, also on a grid. Nothing of the inner streams is kept between the outer blocks."""

    def nested(depth):
        if not depth:
            return Branch()
        blocks = [ReversibleBlock(nested(depth - 1), nested(depth - 1)) for _ in range(2)]
        return Averaged(blocks, engine.backward, exact=20)

    class Averaged(ReversibleSequence):
        def forward(self, x):
            return sum(super().forward(x, x.tanh())) / 2

    found = []
    for plain in (True, False):
        torch.manual_seed(0)
        net = ReversibleSequence([ReversibleBlock(nested(2), nested(1)) for _ in range(2)], engine.backward, exact=20).double()
        for module in net.modules():
            if plain and isinstance(module, ReversibleSequence):
                module.backward = "autograd"
        found.append(gradients(net))
    assert relative_error(found[1], found[0]) <= 1e-12


class Drawing(Branch):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return super().forward(x * self.draw())


@pytest.mark.parametrize(
    "draw",
    [random.random, lambda: random.gauss(1, 0.1), np.random.rand, np.random.standard_normal],
    ids=["random", "random, a normal pair", "numpy", "numpy, a normal pair"],
)
@every_engine
def test_random_numbers_of_python_and_numpy(engine, draw):
    def run(net):
        found, after = [], []
        for seed in range(3):
            random.seed(seed)
            np.random.seed(seed)
            found += gradients(net)
            after.append(draw())
        return found, after

    assert_same(engine, lambda: Drawing(draw), run)


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
    assert_refused(net, "buffer")
    reference.load_state_dict(net.state_dict())
    assert relative_error(gradients(net), gradients(reference)) <= 1e-12
    assert_equal(list(net.buffers()), list(reference.buffers()))


@recomputing_engines
def test_others_that_draw_meanwhile_do_no_harm(engine):
    """Another thread may use Python's random numbers during the forward."""

    def run(net):
        random.seed(0)
        net.blocks[1].register_forward_hook(lambda *_: random.random() and None)
        gradients(net)
        return gradients(net), random.random()

    assert_same(engine, Branch, run)


class Dropping(Branch):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x))


@engines(RECOMPUTING, when=["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_of_blocks_may_draw(engine, when):
    def run(net):
        for block in net.blocks:
            getattr(block, when)(lambda *_: torch.rand(3) is None or None)
        torch.manual_seed(0)
        return gradients(net)

    assert_same(engine, Dropping, run)


class OwnGenerator(Branch):
    def forward(self, x, generator=None):
        return super().forward(x) * torch.rand((), generator=generator, dtype=F64)


@every_engine
def test_a_generator_among_the_keyword_arguments(engine):
    def run(net):
        generator = torch.Generator().manual_seed(3)
        torch.manual_seed(3)  # which g draws from
        return gradients(net, f_kwargs={"generator": generator}), generator.get_state().tolist()

    assert_same(engine, OwnGenerator, run)


@every_engine
def test_a_sequence_within_a_checkpoint(engine):
    def run(net):
        torch.manual_seed(1)
        y1, y2 = checkpoint(net, *streams(), use_reentrant=False)
        return [*torch.autograd.grad((y1 * y2.sin()).sum(), list(net.parameters()))]

    assert_same(engine, lambda: Branch(0.2), run)


class EditsWhatWasSaved(Branch):
    def forward(self, x):
        hidden = torch.tanh(self.inner(x))
        result = self.outer(hidden)
        hidden.add_(1)
        return result


@every_engine
def test_a_saved_tensor_that_the_branch_edits_is_refused_as_by_plain_autograd(engine):
    for net in both(engine, EditsWhatWasSaved):
        assert_refused(net, "modified by an inplace operation")


def test_objects_are_passed_on_and_never_copied():
    class Uncopied:
        scale = 0.5

        def __deepcopy__(self, memory):
            raise AssertionError("copied")

        __copy__ = __reduce_ex__ = __deepcopy__

    seen, given = [], Uncopied()

    class Noting(Branch):
        def forward(self, x, holder):
            seen.append(holder)
            return super().forward(x) * holder.scale

    net = sequence(3, branch=lambda dropout: Noting(), engine=ENGINES["reversible"])
    loss_of(net, f_kwargs={"holder": given}, g_kwargs={"holder": given}).backward()
    assert len(seen) == 12 and all(each is given for each in seen)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_grid_is_not_chosen_from_a_batch_that_says_nothing(value):
    net = ReversibleSequence([ReversibleBlock(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))], exact=True)
    x = torch.full((2, 4), value, requires_grad=True)
    if value == 0:
        sum(net(x, x)).sum().backward()
        assert not net.grid.known
    else:
        with pytest.raises(ValueError, match="no grid can be chosen"):
            net(x, x)
    sum(net(torch.empty(0, 4), torch.empty(0, 4))).sum().backward()
    assert not net.grid.known
    sum(net(torch.ones(2, 4), torch.ones(2, 4))).sum().backward()
    assert net.grid.known


@every_engine
def test_blocks_that_are_added_later_run(engine):
    def run(net):
        net.backward, net.store = "autograd" if net.backward == "autograd" else "reversible", 0
        torch.manual_seed(9)
        net.blocks.append(ReversibleBlock(Branch(), Branch()).double())
        return gradients(net)

    assert_same(engine, Branch, run)


@recomputing_engines
def test_a_hook_that_returns_another_view_of_a_stream(engine):
    net = ReversibleSequence([ReversibleBlock(nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(3)], engine.backward)
    net.blocks[1].register_forward_pre_hook(lambda module, inputs: (inputs[0].T, inputs[1].T, *inputs[2:]))
    if engine.backward == "checkpoint":
        sum(net(torch.rand(3, 3, requires_grad=True), torch.rand(3, 3))).sum().backward()
    else:
        with pytest.raises(ValueError, match="replaced the inputs or outputs"):
            net(torch.rand(3, 3, requires_grad=True), torch.rand(3, 3))


class WritesByData(Branch):
    """The exponential average of a vector quantiser: written without that autograd counts it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.ones((), dtype=F64))

    def forward(self, x):
        self.average.data.mul_(0.5).add_(0.1)
        return super().forward(x) * self.average.clone()


@pytest.mark.parametrize("training", [True, False])
@every_engine
def test_buffers_that_are_written_unseen_or_in_evaluation(engine, training):
    def run(net):
        net.train(training)
        gradients(net)
        return gradients(net), [buffer.item() for buffer in net.buffers()]

    assert_same(engine, WritesByData, run)


@pytest.mark.parametrize("make", [torch.Generator, random.Random, np.random.default_rng])
@every_engine
def test_generators_that_a_branch_owns(engine, make):
    class Owning(Branch):
        def __init__(self):
            super().__init__()
            self.own = make() if make is torch.Generator else make(5)

        def forward(self, x):
            return super().forward(x) * self.drawn()

        def drawn(self):
            return torch.rand((), generator=self.own).item() if make is torch.Generator else self.own.random()

    found = []
    for net in both(engine, Owning):
        net.grid = FixedPointGrid()  # the run that chooses the grid draws nothing either
        for _ in range(2):
            grads = torch.autograd.grad(loss_of(net), list(net.parameters()))
        found.append((grads, [block.f.drawn() for block in net.blocks]))
    reference = both(None, Owning)[0]
    for _ in range(2):
        grads = torch.autograd.grad(loss_of(reference), list(reference.parameters()))
    assert [block.f.drawn() for block in reference.blocks] == found[0][1] == found[1][1]
    assert relative_error(grads, found[0][0]) <= 1e-12
    assert relative_error(found[1][0], found[0][0]) <= 1e-12


class Catching(Branch):
    """A branch that answers any error of its own with another result."""

    def forward(self, x):
        try:
            return super().forward(x)
        except Exception:
            return x.exp()


@pytest.mark.parametrize("hooked", [False, True])
@recomputing_engines
def test_a_branch_may_catch_exceptions_and_have_hooks(engine, hooked):
    """In the second backward, recomputations stop at the last tensor that is saved."""
    calls = []

    def run(net):
        if hooked:
            net.blocks[0].f.register_forward_hook(lambda module, inputs, output: calls.append(module))
        gradients(net)
        return gradients(net)

    assert_same(engine, Catching, run)
    if hooked:
        runs = [calls.count(module) for module in dict.fromkeys(calls)]
        assert runs == [2, 4]  # the plain one, and the one that is recomputed as a whole both times


@recomputing_engines
def test_a_leaf_that_is_read_from_the_second_run_on(engine):
    scale = 1.0
    plain, net = both(engine, lambda: Reading(lambda: scale))
    loss_of(net).backward()
    scale = torch.full((WIDTH,), 2.0, dtype=F64, requires_grad=True)
    gradients = []
    for each in (net, net, plain):
        scale.grad = None
        loss_of(each).backward()
        gradients.append([scale.grad])
    assert relative_error(gradients[0], gradients[2]) < 1e-12 and relative_error(gradients[1], gradients[2]) < 1e-12
    scale = 1.0
    _, net = both(engine, lambda: Reading(lambda: scale))
    loss_of(net).backward()
    scale = torch.full((WIDTH,), 2.0, dtype=F64, requires_grad=True)
    loss = loss_of(net)
    with torch.no_grad():
        scale.fill_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@recomputing_engines
def test_what_a_block_registers_before_the_backward(engine):
    """The recomputation has the submodules and parameters of the forward, also if others stand in their place by then."""
    plain, net = both(engine, lambda: Reading(lambda: 1.0))
    loss_of(plain).backward()
    loss, branch = loss_of(net), net.blocks[1].f
    old = branch.inner
    branch.inner = new = nn.Linear(WIDTH, WIDTH, dtype=F64)
    with torch.no_grad():
        new.weight.zero_()
    net.blocks[2].g.other = nn.Parameter(torch.ones(1))
    weight = net.blocks[0].g.inner.weight
    del net.blocks[0].g.inner.weight
    net.blocks[0].g.inner.weight = nn.Parameter(torch.zeros_like(weight))
    del net.blocks[3].g.inner
    loss.backward()
    assert branch.inner is new and new.weight.grad is None and not hasattr(net.blocks[3].g, "inner")
    found = [old.weight.grad, net.blocks[0].f.inner.weight.grad, weight.grad]
    expected = [plain.blocks[1].f.inner.weight.grad, *(getattr(plain.blocks[0], name).inner.weight.grad for name in "fg")]
    assert relative_error(found, expected) < 1e-12


@recomputing_engines
@pytest.mark.parametrize("fails", ["reads", "branch"])
def test_a_recomputation_that_fails_leaves_everything_as_it_was(engine, fails, monkeypatch):
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
    if fails == "reads":
        monkeypatch.setattr(recomputation.Branch, "_called", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        y1.sum().backward()
    assert all(value is before[name] for name, value in net.named_parameters()) and not recomputing()


class Settings(nn.Module):
    """Notes what the library that computes it is told: in which order attention's kernels, which convolutions."""

    def __init__(self):
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.ones(4)), []

    def forward(self, x):
        cudnn = torch.backends.cudnn
        order, dtype = torch._C._get_sdp_priority_order(), torch.get_default_dtype()
        self.seen.append((order, cudnn.benchmark, cudnn.deterministic, dtype))
        return (x * self.weight).sin()


@pytest.mark.parametrize("backward", ["checkpoint", "reversible"])
def test_libraries_choose_in_the_recomputation_as_in_the_forward(monkeypatch, backward):
    """Attention's order and the default dtype are those of the forward, and no convolution is chosen by a race, which each
    thread has for itself."""
    ordinary = replay.Call.__init__

    def on_gpu(self, *arguments):
        ordinary(self, *arguments)
        self.on_gpu = True

    monkeypatch.setattr(replay.Call, "__init__", on_gpu)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    default, branch = torch._C._get_sdp_priority_order(), Settings()
    net = ReversibleSequence([ReversibleBlock(branch, branch)], backward)
    x1, x2 = torch.rand(2, 2, 4)
    torch.set_default_dtype(torch.float64)
    try:
        with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
            y1, y2 = net(x1, x2)
    finally:
        torch.set_default_dtype(torch.float32)
    (y1 * y2).sum().backward()
    assert len(branch.seen) == 4 and set(map(str, branch.seen)) == {str(branch.seen[0])}
    assert branch.seen[0][0][0] == SDPBackend.MATH.value and branch.seen[0][1:] == (False, True, F64)
    assert torch.get_default_dtype() == torch.float32
    assert torch._C._get_sdp_priority_order() == default and torch.backends.cudnn.benchmark


CUDNN, FLASH, EFFICIENT, MATH, OTHER = 3, 1, 2, 0, 4


def put_cudnn_first():
    torch._C._set_sdp_priority_order([CUDNN, FLASH, EFFICIENT, MATH, OTHER])


CHANGES = {
    "order of attention": (put_cudnn_first, lambda: torch._C._get_sdp_priority_order()[0] == CUDNN),
    "flash attention": (lambda: kernels.enable_flash_sdp(False), lambda: not kernels.flash_sdp_enabled()),
    "cuDNN's attention": (lambda: kernels.enable_cudnn_sdp(False), lambda: not kernels.cudnn_sdp_enabled()),
    "default dtype": (lambda: torch.set_default_dtype(F64), lambda: torch.get_default_dtype() == F64),
}
"""What the first use of an operator may change, and whether it has."""


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


@pytest.fixture
def restored_settings():
    order, before = torch._C._get_sdp_priority_order(), [allowed() for allowed, _ in replay._KERNELS]
    yield
    torch.set_default_dtype(torch.float32)
    torch._C._set_sdp_priority_order(order)
    for (_, allow), allowed in zip(replay._KERNELS, before, strict=True):
        allow(allowed)


@pytest.mark.parametrize(
    ("backward", "change"), paired(["reversible", "pareprop", "checkpoint", "make_reversible"], [*CHANGES])
)
def test_the_first_use_of_an_operator_may_change_a_setting(backward, change, restored_settings):
    change, kernel = CHANGES[change]

    def gradients(backward, *changes):
        changes = [*changes]
        torch.manual_seed(0)
        blocks = [FirstUse(changes, kernel) for _ in range(6)]
        if made_reversible:
            net = make_reversible(nn.Sequential(nn.Sequential(*blocks)), "0", backward=backward)
            torch.manual_seed(1)
            loss = net(streams()[0]).square().sum()
        else:
            net = ReversibleSequence([ReversibleBlock(*blocks[at : at + 2]) for at in (0, 2, 4)], backward)
            loss = loss_of(net)
        return torch.autograd.grad(loss, list(net.parameters()))

    made_reversible = backward == "make_reversible"
    ours = gradients("reversible" if made_reversible else backward, change)
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
