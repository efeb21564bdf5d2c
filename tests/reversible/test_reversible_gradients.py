"""Every engine against plain autograd in float64: gradients, random state and buffers after a step."""

import copy
import functools
import gc
import pickle
import weakref
from collections import Counter
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from compared import assert_close, assert_equal
from covering import chosen, paired
from engine_cases import CASES, ENGINES, F64, WIDTH, AttentionBranch, Case, Engine, exchange, relative_error, sequence
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from holotrain.reversible import ReversibleBlock, ReversibleSequence, backward_schedules, recomputation, recomputing

every_engine = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)


@dataclass
class Outcome:
    loss: torch.Tensor
    grads: list
    random_state: torch.Tensor
    buffers: list


def outcome(case: Case, engine: Engine | None = None, by: str = "backward", device: str = "cpu") -> Outcome:
    """Gradients of all parameters, of the input and of the keyword tensors, and what the step leaves behind."""
    net = sequence(case.depth, case.dropout, case.branch, engine).to(device)
    stem = nn.Linear(WIDTH, WIDTH).double().to(device)
    if case.prepare:
        case.prepare(net, stem)
    f_kwargs, g_kwargs = (given() if callable(given) else given for given in (case.f_kwargs, case.g_kwargs))
    keyword = [t for t in torch.utils._pytree.tree_leaves([f_kwargs, g_kwargs]) if isinstance(t, torch.Tensor)]
    leaves = list(dict.fromkeys(p for p in [*stem.parameters(), *net.parameters(), *keyword] if p.requires_grad))
    x = torch.randn(2, 3, WIDTH, dtype=F64, generator=torch.Generator().manual_seed(0)).to(device)
    torch.manual_seed(7)
    loss = 0
    for call in range(case.calls):
        x1, x2 = stem(x + call), stem(x).tanh()
        y1, y2 = net(x1, x2, f_kwargs=f_kwargs, g_kwargs=g_kwargs)
        loss = loss + (case.loss(y1, y2) if case.loss else (y1 * y2.sin()).sum() * (call + 1))
    if by == "autograd.grad":
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    else:
        for leaf in leaves:
            leaf.grad = None
        loss.backward()
        grads = [leaf.grad for leaf in leaves]
    random_state = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
    return Outcome(loss, [None if g is None else g.clone() for g in grads], random_state, list(net.buffers()))


@functools.cache
def plain(name: str) -> Outcome:
    return outcome(CASES[name])


OTHERS = [name for name in ENGINES if name not in ("reversible", "pareprop")]


def quick(number: int, case: tuple[str, str]) -> bool:
    """Of the other engines, one for each case, in turn."""
    name, engine = case
    return engine not in OTHERS or engine == OTHERS[[*CASES].index(name) % len(OTHERS)]


@pytest.mark.parametrize(("name", "engine"), chosen([*product(CASES, ENGINES)], quick))
def test_a_step_equals_plain_autograds(name, engine):
    ours, reference = outcome(CASES[name], ENGINES[engine]), plain(name)
    assert_equal(ours.loss, reference.loss)
    assert relative_error(ours.grads, reference.grads) <= 1e-10
    assert_equal(ours.random_state, reference.random_state)
    assert_equal(ours.buffers, reference.buffers)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not (case.f_kwargs or case.g_kwargs)])
@every_engine
def test_on_cuda_a_step_equals_plain_autograds(name, engine):
    ours, reference = outcome(CASES[name], engine, device="cuda"), outcome(CASES[name], device="cuda")
    assert relative_error(ours.grads, reference.grads) <= 1e-10
    assert_equal(ours.random_state, reference.random_state)
    assert_close(ours.buffers, reference.buffers)


@pytest.mark.parametrize(
    ("engine", "name"),
    paired([*ENGINES.values()], ["dropout", "frozen blocks", "shared blocks", "keyword tensors with gradient"]),
)
def test_autograd_grad_gives_the_same(name, engine):
    assert relative_error(outcome(CASES[name], engine, by="autograd.grad").grads, plain(name).grads) <= 1e-10


@every_engine
def test_a_gradient_of_one_block_alone(engine):
    grads = []
    for net in (sequence(5), sequence(5, engine=engine)):
        x = torch.linspace(-1, 1, 6 * WIDTH, dtype=F64).view(2, 3, WIDTH)
        loss = sum(y.sin().sum() for y in net(x, x))
        grads.append(torch.autograd.grad(loss, net.blocks[2].f.inner.weight))
    assert relative_error(grads[1], grads[0]) <= 1e-10


@pytest.mark.parametrize(("engine", "dtype"), paired([*ENGINES.values()], [torch.bfloat16, torch.float16]))
def test_autocast_is_restored_in_the_recomputation(dtype, engine):
    """The recomputed branches must run in the autocast dtype of the forward: then all schedules agree to fp32 rounding."""
    results = []
    for net in (sequence(12, dropout=0.1), sequence(12, dropout=0.1, engine=engine)):
        net.float()
        x = torch.randn(4, 3, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
        torch.manual_seed(3)
        with torch.autocast("cpu", dtype=dtype):
            y1, y2 = net(x, x)
        assert y1.dtype == y2.dtype == torch.float32
        (y1 * y2).sum().backward()
        results.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    assert ((results[1] - results[0]).norm() / results[0].norm()).item() <= 1e-3


@pytest.mark.parametrize(("engine", "context"), paired([*ENGINES.values()], [torch.no_grad, torch.inference_mode]))
def test_without_gradients_the_blocks_simply_run(context, engine):
    net = sequence(4, engine=engine).eval()
    x = torch.randn(2, 3, WIDTH, dtype=F64)
    expected = x, x
    for block in net.blocks:
        expected = block(*expected)
    with context():
        y = net(x, x)
    assert_equal(y, expected)
    assert_equal(net(x, x), expected)


def test_inverse_rebuilds_the_input():
    net = sequence(24)
    x1, x2 = torch.randn(2, 2, 3, WIDTH, dtype=F64)
    kwargs = {"f_kwargs": {"scale": 0.7}, "g_kwargs": {"bias": torch.ones(2 * WIDTH, dtype=F64)}}
    with torch.no_grad():
        rebuilt = net.inverse(*net(x1, x2, **kwargs), **kwargs)
    assert relative_error(rebuilt, (x1, x2)) <= 1e-10


def test_exchanged_streams_let_f_read_what_f_wrote():
    net = sequence(3, engine=Engine("reversible"))
    exchange(net, None)
    x1, x2 = torch.randn(2, 2, 3, WIDTH, dtype=F64)
    first, second, third = net.blocks
    one = x1 + first.f(x2)
    other = x2 + first.g(one)
    other = other + second.f(one)
    one = one + second.g(other)
    one = one + third.f(other)
    other = other + third.g(one)
    y1, y2 = net(x1, x2)
    assert_equal((y1, y2), (other, one))
    rebuilt = net.inverse(y1, y2)
    assert relative_error(rebuilt, (x1, x2)) <= 1e-10


@every_engine
def test_copies_and_pickles(engine):
    net = sequence(3, engine=engine)
    x = torch.linspace(-1, 1, 6 * WIDTH, dtype=F64).view(2, 3, WIDTH)
    sum(y.sin().sum() for y in net(x, x)).backward()
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert (twin.backward, len(list(twin.store)) if engine.store == "even" else twin.store) == (
            net.backward,
            len(list(net.store)) if engine.store == "even" else net.store,
        )
        twin.zero_grad()
        sum(y.sin().sum() for y in twin(x, x)).backward()
        assert relative_error([p.grad for p in twin.parameters()], [p.grad for p in net.parameters()]) == 0


@pytest.mark.parametrize(("keep", "attention", "products"), [((), 3, 3), (("attention",), 1, 3), (("matmul",), 1, 1)])
def test_what_is_kept_is_not_recomputed(keep, attention, products):
    """Counted in calls of the operators: a forward, and two recomputations that were not skipped."""
    calls = Counter()

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            calls[function.overloadpacket.__name__] += 1
            return function(*args, **(kwargs or {}))

    net, x = sequence(3, branch=AttentionBranch, engine=Engine("reversible", keep=keep)), torch.zeros(2, 3, WIDTH, dtype=F64)
    with Counting():
        loss = sum(net(x, x)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert calls["_scaled_dot_product_flash_attention_for_cpu"] == attention * 6 and calls["addmm"] == products * 6


class Rectified(nn.Module):
    """Changes the first of its products in place."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.outer(self.inner(x).relu_()).tanh()


def test_what_is_kept_goes_when_it_is_of_no_more_use(monkeypatch):
    """What was changed in place, what no backward will ask for, and what a backward has used."""
    kept, alias = [], backward_schedules._alias

    def noted(result):
        found = alias(result)
        kept.append(weakref.ref(found))
        return found

    monkeypatch.setattr(backward_schedules, "_alias", noted)
    net = ReversibleSequence([ReversibleBlock(Rectified(), Rectified()) for _ in range(3)], keep="matmul")
    net.blocks[0].requires_grad_(False)
    x = torch.ones(2, WIDTH)
    y1, y2 = net(x, x)
    assert [result() is not None for result in kept] == 4 * [False] + 4 * [False, True]
    torch.autograd.grad((y1 * y2).sum(), [*net.blocks[1:].parameters()])
    assert not [result for result in kept if result() is not None]


def test_products_that_a_hook_leaves_out_in_the_recomputation_are_refused():
    """Those that come later would be taken for them."""
    net = sequence(2, engine=ENGINES["keeping products"])

    def measure(module, inputs, output):
        if not recomputing():
            output.detach().flatten(1) @ output.detach().flatten(1).T

    net.blocks[0].f.inner.register_forward_hook(measure)
    x = torch.ones(2, 3, WIDTH, dtype=F64)
    loss = sum(net(x, x)).sum()
    with pytest.raises(RuntimeError, match="did something else"):
        loss.backward()


def test_compiled_functions_stay_compiled_where_results_are_kept():
    compiled = torch.compile(torch.sin, backend="eager", fullgraph=True)

    class Calling(Rectified):
        def forward(self, x):
            return self.outer(compiled(self.inner(x)))

    net, x = ReversibleSequence([ReversibleBlock(Calling(), Calling())], keep="matmul"), torch.ones(2, WIDTH)
    sum(net(x, x)).sum().backward()  # under another mode, such a function is an error


@every_engine
def test_a_model_that_is_dropped_is_freed(engine):
    """Also if a submodule knows the block, by a hook: nothing that is noted of a branch may hold it."""
    net = sequence(2, engine=engine)
    for block in net.blocks:
        for part in block.f.modules():
            part.register_forward_hook(lambda *_, block=block: None)
    x = torch.randn(2, 3, WIDTH, dtype=F64)
    sum(y.sum() for y in net(x, x)).backward()
    alive = [weakref.ref(block.f) for block in net.blocks]
    del net, block, part
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


@every_engine
def test_a_graph_that_is_dropped_frees_what_it_kept(engine, monkeypatch):
    """Without waiting for the garbage collector: a forward in training that is never differentiated must leave nothing."""
    alive, begin = weakref.WeakSet(), recomputation.Branch.__init__

    def watched(self, *arguments):
        begin(self, *arguments)
        alive.add(self)

    monkeypatch.setattr(recomputation.Branch, "__init__", watched)
    net = sequence(5, branch=AttentionBranch, engine=engine)
    x = torch.zeros(2, 3, WIDTH, dtype=F64)
    gc.collect()
    gc.disable()
    try:
        y1, y2 = net(x, x)
        assert alive
        del y1, y2
        assert not alive
        sum(y.sum() for y in net(x, x)).backward()
        assert not alive
    finally:
        gc.enable()


@every_engine
def test_second_derivatives(engine):
    """A penalty on the gradient, as in WGAN-GP: the graph of the first backward is differentiated, too."""
    found = []
    for net in (sequence(3, dropout=0.2), sequence(3, dropout=0.2, engine=engine)):
        x = torch.linspace(-1, 1, 6 * WIDTH, dtype=F64).view(2, 3, WIDTH).requires_grad_()
        torch.manual_seed(2)
        y1, y2 = net(x, x.tanh())
        (grad,) = torch.autograd.grad((y1 * y2.sin()).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum(), [x, *net.parameters()], allow_unused=True))
    assert relative_error(found[1], found[0]) <= 1e-10


@every_engine
def test_a_loss_on_an_inner_block(engine):
    """Alone, and together with one on the output: features of an intermediate block, taken by a hook."""
    for alone in (True, False):
        found = []
        for net in (sequence(5, dropout=0.2), sequence(5, dropout=0.2, engine=engine)):
            seen = []
            net.blocks[2].register_forward_hook(lambda module, inputs, output, seen=seen: seen.append(output[0]))
            x = torch.linspace(-1, 1, 6 * WIDTH, dtype=F64).view(2, 3, WIDTH).requires_grad_()
            torch.manual_seed(2)
            y1, y2 = net(x, x.tanh())
            loss = seen[0].sin().sum() + (0 if alone else (y1 * y2).sum())
            found.append(torch.autograd.grad(loss, [x, *net.parameters()], allow_unused=True))
        assert relative_error(found[1], found[0]) <= 1e-10


@every_engine
def test_what_is_not_asked_for_is_not_computed(engine):
    """FLOPs: the forward once, what is recomputed once, the backward once; and without gradients of weights their products.

    The second recomputation leaves out the last product of branches that are not inverted.
    """
    flops = {}
    for kind, net in (("plain", sequence(4)), ("ours", sequence(4, engine=engine))):
        x = torch.zeros(2, 3, WIDTH, dtype=F64, requires_grad=True)
        for wanted in ("nothing", "input", "all"):
            with FlopCounterMode(display=False) as counter:  # whose hooks take no leaves
                loss = sum(y.sin().sum() for y in net(x.clone(), x.clone()))
                if wanted != "nothing":
                    torch.autograd.grad(loss, [x] if wanted == "input" else [x, *net.parameters()])
            flops[kind, wanted] = counter.get_total_flops()
    forward = flops["plain", "nothing"]
    kinds = [
        "kept" if schedule.keep else schedule.kind for schedule in net.schedules
    ]  # the products, which are all that counts
    recomputed = sum(kind in ("rebuilt", "checkpointed") for kind in kinds) / len(kinds) * forward
    begun = sum(kind == "rebuilt" and before not in (kind, "kept") for before, kind in zip([None, *kinds], kinds, strict=False))
    left_out = (2 * kinds.count("checkpointed") + begun) * 2 * (2 * 3) * (2 * WIDTH) * WIDTH
    assert flops["ours", "nothing"] == forward
    assert flops["ours", "input"] == flops["plain", "input"] + recomputed
    assert flops["ours", "all"] == flops["plain", "all"] + recomputed - left_out
