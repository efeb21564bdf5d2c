"""Every engine against plain autograd in float64: gradients, random state and buffers after a step."""

import copy
import gc
import pickle
import random
import weakref
from collections import Counter

import pytest
import torch
from compared import assert_close, assert_equal
from covering import chosen, long, paired, pairwise, slow
from engine_branches import BRANCHES, F64, WIDTH, AttentionBranch, Branch
from engine_cases import ENGINES, FACTORS, exchange, outcome, relative_error, sequence
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from tracked_memory import TrackedMemory

from holotrain.models.layers.blocks import ResidualBlock, ResidualSequence
from holotrain.reversible import ReversibleBlock, ReversibleSequence
from holotrain.reversible.context import recomputing
from holotrain.reversible.recording import Recorded
from holotrain.reversible.schedule import from_stored
from holotrain.reversible.settings import Call
from holotrain.schedules import OF_REVERSIBLE

every_engine = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
MATRIX = pairwise(*FACTORS.values())


def assert_as_plain(engine, *case, equal=assert_equal, **options):
    ours, plain = outcome(engine, *case, **options), outcome(None, *case, **options)
    assert relative_error(ours.grads, plain.grads) <= 1e-10
    assert ours.drawn == plain.drawn
    equal(ours.losses, plain.losses)
    equal(ours.buffers, plain.buffers)


@pytest.mark.parametrize(tuple(FACTORS), chosen(MATRIX, lambda number, case: number % 4 == 0))
def test_a_step_equals_plain_autograds(engine, branch, network, keywords, use, dropout, depth):
    assert_as_plain(ENGINES[engine], BRANCHES[branch], network, keywords, use, dropout, depth)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    tuple(FACTORS), [case for case in MATRIX if "draws" not in case and not {*case} & {"a generator", "an array"}]
)
def test_on_cuda_a_step_equals_plain_autograds(engine, branch, network, keywords, use, dropout, depth):
    case = BRANCHES[branch], network, "no keywords", use, dropout, depth
    assert_as_plain(ENGINES[engine], *case, equal=assert_close, device="cuda")


def random_case(seed):
    """A case of the matrix in which each branch, and each block's schedule, is another one."""
    dice = random.Random(seed)
    case = {name: dice.choice(values) for name, values in FACTORS.items()}
    schedules = (*OF_REVERSIBLE, "reversible+attention", "pareprop+matmul")
    depth = dice.randint(1, 9)
    backward = [dice.choice(schedules) for _ in range(depth)]
    engine = {"backward": backward, "store": [number for number in range(depth) if dice.random() < 0.1]}
    any_branch = lambda dropout: random.choice([*BRANCHES.values()])(dropout)  # noqa: E731
    return engine, any_branch, case["network"], case["keywords"], case["use"], case["dropout"], depth


@pytest.mark.parametrize("first", [0, slow(20), *map(long, range(100, 2000, 100))])
def test_random_cases(first):
    for seed in range(first, first + (20 if first < 100 else 100)):
        assert_as_plain(*random_case(seed), seed=seed)


def half_precision(branch, backward, dtype, compiled, exact):
    """Gradients under autocast; on a grid streams are rebuilt bit for bit, so that gradients must be equal, too."""
    net = sequence(9, 0.1, branch, ENGINES.get(backward), exact=exact).float()
    if compiled:
        for block in net.blocks:
            block.f.compile(backend="aot_eager")
    x = torch.randn(4, 3, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    torch.manual_seed(3)
    with torch.autocast("cpu", dtype):
        y1, y2 = net(x, x.tanh())
    assert y1.dtype == y2.dtype == torch.float32
    return torch.autograd.grad((y1 * y2.sin()).sum(), list(net.parameters()))


@pytest.mark.parametrize(
    ("backward", "branch", "dtype", "compiled"),
    [
        *((*case, False) for case in paired([*ENGINES], [Branch, AttentionBranch], [torch.bfloat16, torch.float16])),
        *(slow(backward, AttentionBranch, torch.bfloat16, True) for backward in ("checkpoint", "reversible", "pareprop")),
    ],
)
def test_autocast_is_that_of_the_forward_in_the_recomputation(backward, branch, dtype, compiled):
    torch.compiler.reset()
    ours, plain = (half_precision(branch, each, dtype, compiled, exact=14) for each in (backward, "plain"))
    assert relative_error(ours, plain) <= 1e-5
    if branch is Branch:
        ours, plain = (half_precision(branch, each, dtype, compiled, exact=False) for each in (backward, "plain"))
        assert relative_error(ours, plain) <= 1e-2


@pytest.mark.parametrize(("engine", "context"), paired([*ENGINES.values()], [torch.no_grad, torch.inference_mode]))
def test_without_gradients_the_blocks_simply_run(context, engine):
    net = sequence(4, engine=engine).eval()
    x = torch.randn(2, 3, WIDTH, dtype=F64)
    expected = x, x
    for block in net.blocks:
        expected = block(*expected)
    with context():
        assert_equal(net(x, x), expected)
    assert_equal(net(x, x), expected)


def test_inverse_rebuilds_the_input():
    net = sequence(24)
    x1, x2 = torch.randn(2, 2, 3, WIDTH, dtype=F64)
    kwargs = {"f_kwargs": {"scale": 0.7}, "g_kwargs": {"bias": torch.ones(2 * WIDTH, dtype=F64)}}
    with torch.no_grad():
        rebuilt = net.inverse(*net(x1, x2, **kwargs), **kwargs)
    assert relative_error(rebuilt, (x1, x2)) <= 1e-10


def test_exchanged_streams_let_f_read_what_f_wrote():
    net = sequence(3, engine=ENGINES["reversible"])
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
    assert relative_error(net.inverse(y1, y2), (x1, x2)) <= 1e-10


def step(net):
    net.zero_grad()
    x = torch.linspace(-1, 1, 6 * WIDTH, dtype=F64).view(2, 3, WIDTH)
    y1, y2 = net(x, x.tanh())
    (y1 * y2.sin()).sum().backward()
    return [p.grad for p in net.parameters()]


def test_copies_pickles_and_blocks_that_are_added():
    net = sequence(3, backward=["reversible", "checkpoint", "autograd"], store=[1])
    expected = step(net)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert (twin.backward, twin.store) == (net.backward, net.store)
        assert_equal(step(twin), expected)
    net.backward, net.store, plain = "reversible", 0, sequence(3)
    for each in (net, plain):
        torch.manual_seed(9)
        each.blocks.append(ReversibleBlock(Branch(), Branch()).double())
    assert relative_error(step(net), step(plain)) <= 1e-12


@pytest.mark.parametrize(("keep", "attention", "products"), [((), 3, 4), (("attention",), 1, 4), (("matmul",), 1, 1)])
def test_what_is_kept_is_not_recomputed(keep, attention, products):
    """Counted in calls of the operators: a forward, and two recomputations that were not skipped."""
    calls = Counter()

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            calls[function.overloadpacket.__name__] += 1
            return function(*args, **(kwargs or {}))

    net = sequence(3, branch=AttentionBranch, backward="reversible", keep=keep)
    x = torch.zeros(2, 3, WIDTH, dtype=F64)
    with Counting():
        loss = sum(net(x, x)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert calls["_scaled_dot_product_flash_attention_for_cpu"] == attention * 6
    assert (products == 1 and calls["addmm"] == 3 * 6) or (products > 1 and calls["addmm"] > 3 * 6)


class Calling(nn.Linear):
    function = staticmethod(torch.compile(torch.sin, backend="eager", fullgraph=True))

    def forward(self, x):
        return self.function(super().forward(x))


def test_compiled_functions_stay_compiled_where_results_are_kept():
    net = ReversibleSequence([ReversibleBlock(Calling(WIDTH, WIDTH), Calling(WIDTH, WIDTH))], keep="matmul")
    x = torch.ones(2, WIDTH)
    sum(net(x, x)).sum().backward()  # under another mode, such a function is an error


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


@every_engine
def test_a_model_that_is_dropped_is_freed(engine):
    """Also if a submodule knows the block, by a hook: nothing that is noted of a branch may hold it."""
    net = sequence(2, engine=engine)
    for block in net.blocks:
        for part in block.f.modules():
            part.register_forward_hook(lambda *_, block=block: None)
    step(net)
    alive = [weakref.ref(block.f) for block in net.blocks]
    del net, block, part
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


@every_engine
def test_a_graph_that_is_dropped_frees_what_it_kept(engine):
    """Without waiting for the garbage collector: a forward in training that is never differentiated must leave nothing."""
    net, x = sequence(5, branch=AttentionBranch, engine=engine), torch.zeros(2, 3, WIDTH, dtype=F64)
    step(net)
    gc.disable()
    try:
        with TrackedMemory(net) as memory:
            for differentiated in (False, True, True):
                y1, y2 = net(x, x)
                loss = (y1 * y2).sum()
                assert memory.alive > 2 * x.nbytes
                if differentiated:
                    loss.backward()
                del y1, y2, loss
                assert memory.alive <= x.nbytes + 100  # of the checks
    finally:
        gc.enable()


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
    kinds = ["kept" if schedule.keep else schedule.kind for schedule in net.schedules]  # the products are all that counts
    recomputed = sum(kind in ("rebuilt", "checkpointed") for kind in kinds) / len(kinds) * forward
    begun = sum(kind == "rebuilt" and before not in (kind, "kept") for before, kind in zip([None, *kinds], kinds, strict=False))
    left_out = (2 * kinds.count("checkpointed") + begun) * 2 * (2 * 3) * (2 * WIDTH) * WIDTH
    assert flops["ours", "nothing"] == forward
    assert flops["ours", "input"] == flops["plain", "input"] + recomputed
    assert flops["ours", "all"] == flops["plain", "all"] + recomputed - left_out


# A profiler's trace shows the schedules: which block, what, in which order.


def residual(backward):
    layers = [nn.Linear(WIDTH, WIDTH, dtype=F64) for _ in range(6)]
    return ResidualSequence(map(ResidualBlock, layers[:3], layers[3:]), backward)


def names(run):
    """In order of their beginnings."""
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        run()
    named = [event for event in watched.events() if event.is_user_annotation]
    return [event.name for event in sorted(named, key=lambda event: event.time_range.start)]


def halves(*blocks):
    return [f"recompute {i}.{letter}" for i in blocks for letter in "gf"]


FORWARD, STREAM = [f"forward {i}" for i in range(3)], torch.ones(2, 3, WIDTH, dtype=F64, requires_grad=True)


@pytest.mark.parametrize(
    ("options", "recomputed"),
    [
        *(({"backward": backward}, halves(2, 1, 0)) for backward in ("checkpoint", "reversible", "pareprop")),
        ({"backward": "reversible", "store": [1]}, halves(2, 0)),
        ({"backward": "autograd"}, []),
    ],
)
def test_blocks_are_recomputed_from_the_last(options, recomputed):
    net = sequence(3, **options)
    assert names(lambda: step(net)) == [*FORWARD, *recomputed]


@pytest.mark.parametrize(("backward", "recomputed"), [("autograd", []), ("checkpoint", [2, 1, 0])])
def test_blocks_of_one_stream_are_recomputed_from_the_last(backward, recomputed):
    """Also compiled, where the model is whole and not compiled anew for a profiler."""
    net, compilations = residual(backward), []
    assert names(lambda: net(STREAM).sum().backward()) == [*FORWARD, *(f"recompute {number}" for number in recomputed)]
    whole = torch.compile(net, backend=lambda graph, inputs: compilations.append(graph) or graph, fullgraph=True)
    whole(STREAM).sum().backward()
    seen = names(lambda: whole(STREAM).sum().backward())
    assert len(compilations) == 1 and not any(name.startswith("forward") for name in seen)


def test_nothing_is_named_where_operations_are_counted():
    def counted():
        with FlopCounterMode(display=False):
            step(sequence(3, backward="reversible"))

    assert not any(name.startswith(("forward", "recompute")) for name in names(counted))


class Flash(nn.Module):
    """The operator of a GPU returns some None beside its tensors."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(64, 192, device="cuda", dtype=torch.bfloat16)

    def forward(self, x):
        query, key, value = self.project(x).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0].transpose(1, 2).flatten(2)


def test_the_attention_of_a_gpu_is_kept():
    with FakeTensorMode():
        x = torch.empty(2, 16, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        run = Recorded("a", Flash(), {}, Call(x.device), ("attention",))
        from_stored(run, x)
        out, saved = run.replay(x)
    assert out.shape == (2, 16, 64) and len(saved) == len(run.kinds)


def test_a_kept_result_that_was_changed_in_place_is_computed_again():
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(2, 3, 4, requires_grad=True)
    out = from_stored(Recorded("a", module, {}, Call(x.device), ("matmul",)), x)
    out.mul_(2)
    found = torch.autograd.grad(out.square().sum(), x)
    assert_close(found, torch.autograd.grad((module(x) * 2).square().sum(), x))
