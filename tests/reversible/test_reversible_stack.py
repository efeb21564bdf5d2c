"""Stacks of blocks that make_reversible found in a model: schedules, what passes through, what is refused."""

import copy
import gc
import pickle
import weakref
from contextlib import suppress

import pytest
import torch
from compared import assert_equal
from covering import pairwise
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from tracked_memory import TrackedMemory

from holotrain.reversible import ReversibleStack, kept_between_blocks, make_reversible, recomputing, stack_of, undo
from holotrain.reversible.tape import Tape

WIDTH = 16


class Block(nn.Module):
    """A pre-norm block of a transformer; ``after``: normed after each branch, as in BERT."""

    def __init__(self, after=False, dropout=0.1):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.outer = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * WIDTH, WIDTH))
        self.after = after

    def attention(self, x, mask):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return self.outer(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(-2))

    def forward(self, x, mask=None):
        if self.after:
            x = self.norm1(x + self.attention(x, mask))
            return self.norm2(x + self.mlp(x))
        x = x + self.attention(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, depth=6, **options):
        super().__init__()
        self.stem, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(Block(**options) for _ in range(depth))
        self.mask = nn.Parameter(torch.zeros(5, 5))

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x, mask=self.mask)
        return self.head(x)


def model(dtype=torch.float32, **options):
    torch.manual_seed(0)
    return Model(**options).to(dtype)


def inputs(dtype=torch.float32):
    return torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1)).to(dtype)


def gradients(net, steps=2, amp=False, x=None):
    x = inputs(next(net.parameters()).dtype) if x is None else x
    for step in range(steps):  # the first chooses the grid
        net.zero_grad()
        torch.manual_seed(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            loss = net(x).float().sin().sum()
        loss.backward()
    return {name: p.grad for name, p in net.named_parameters() if p.requires_grad}


MIXED = ["reversible", "reversible", "checkpoint", "autograd", "pareprop", "reversible"]


@pytest.mark.parametrize(
    ("backward", "dtype", "amp", "options"),
    pairwise(
        ["checkpoint", "reversible", "pareprop", MIXED],
        [torch.float32, torch.float64, torch.bfloat16],
        [False, True],
        [{}, {"after": True}],
    ),
)
def test_gradients_equal_those_of_autograd(backward, dtype, amp, options):
    expected = gradients(make_reversible(model(dtype, **options), backward="autograd"), amp=amp)
    assert_equal(gradients(make_reversible(model(dtype, **options), backward=backward), amp=amp), expected)


def test_attention_is_kept():
    """Without autocast: kept results are not cast from its cache, so that gradients of a shared mask round otherwise."""
    expected = gradients(make_reversible(model(), backward="autograd"))
    net = make_reversible(model(), keep="attention")
    assert stack_of(net.layers[0]).schedules[2].keep == ("attention",)
    assert_equal(gradients(net), expected)


@pytest.mark.parametrize("bits", [1, 3, 8, [1, 2, 3, 4, 5]])
def test_any_number_of_bits(bits):
    expected = gradients(make_reversible(model(), bits=bits, backward="autograd"))
    assert_equal(gradients(make_reversible(model(), bits=bits)), expected)


def test_the_model_stays_what_it_is():
    plain = model()
    names, before = list(plain.state_dict()), plain.eval()(inputs())
    net = make_reversible(model(), "layers")
    gradients(net)
    assert list(net.state_dict()) == names
    assert [type(part) for part in net.modules()] == [type(part) for part in plain.modules()]
    assert_equal(net.eval()(inputs()), before)
    plain.load_state_dict(net.state_dict())


def test_undo_gives_the_plain_forward_back():
    plain = model(dropout=0.0)
    net = undo(make_reversible(model(dropout=0.0)))
    assert all("forward" not in vars(layer) for layer in net.layers)
    assert_equal(gradients(net), gradients(plain))


def test_a_forward_of_a_block_s_own_comes_back():
    net = model(dropout=0.0)

    def twice(x, mask=None):
        return Block.forward(net.layers[0], x, mask) * 2

    net.layers[0].forward = twice
    expected = net(inputs())
    assert_equal(make_reversible(net).eval()(inputs()), expected)
    assert undo(net).layers[0].forward is twice


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["deepcopy", "pickle"])
def test_a_copy_has_blocks_of_its_own(copied):
    net = make_reversible(model())
    gradients(net)
    twin = copied(net)
    assert stack_of(twin.layers[0]) is not stack_of(net.layers[0])
    assert stack_of(twin.layers[0]).blocks == list(twin.layers)
    assert_equal(gradients(twin, steps=1), gradients(net, steps=1))
    assert_equal(gradients(undo(twin)), gradients(undo(net)))


def test_the_grid_of_a_training_can_be_taken_over():
    net, other = make_reversible(model()), make_reversible(model())
    x = inputs() * 3
    gradients(net)
    stack_of(other.layers[0]).load_grid_state(stack_of(net.layers[0]).grid_state())
    assert_equal(gradients(other, steps=1, x=x), gradients(net, steps=1, x=x))


@pytest.mark.parametrize(
    "state", [{}, {"step": 0.3, "dtype": "float32"}, {"step": 0.5, "dtype": "int8"}, {"step": -1.0, "dtype": "float32"}]
)
def test_no_grid_of_a_training(state):
    with pytest.raises(ValueError, match="not the grid"):
        stack_of(make_reversible(model()).layers[0]).load_grid_state(state)


def test_streams_with_few_very_large_elements_are_kept_in_fp64():
    """As in Llama: a few channels are 10,000 times as large as the others."""

    def large():
        net = model()
        with torch.no_grad():
            net.stem.bias[3] = 1e4
        return make_reversible(net)

    net = large()
    expected = gradients(net)
    stack = stack_of(net.layers[0])
    assert stack.stream_dtype == torch.float64
    assert stack.grid.upcoming.item() < 1e-6
    plain = large()
    stack_of(plain.layers[0]).backward = "autograd"
    assert_equal(gradients(plain), expected)
    assert net(inputs()).dtype == torch.float32


def test_the_grid_follows_the_streams():
    net = make_reversible(model())
    gradients(net)
    stack = stack_of(net.layers[0])
    before = stack.grid.upcoming.item()
    with torch.no_grad():
        net.stem.bias.fill_(20 * before * 2**24)
    with pytest.warns(UserWarning, match="The next step has a coarser grid"):
        gradients(net, steps=1)
    twin = copy.deepcopy(net)
    stack_of(twin.layers[0]).backward = "autograd"
    after = stack.grid.upcoming.item()
    assert after >= 2**5 * before
    assert_equal(gradients(net), gradients(twin))
    assert stack.grid.upcoming.item() == after


def test_adapters_and_frozen_weights():
    def adapted():
        net = model()
        net.requires_grad_(False)
        for layer in net.layers:
            layer.outer = nn.Sequential(layer.outer, nn.Linear(WIDTH, WIDTH))
            layer.outer[1].requires_grad_(True)
        return net

    expected = gradients(make_reversible(adapted(), backward="autograd"))
    assert len(expected) == 12
    assert_equal(gradients(make_reversible(adapted())), expected)


@pytest.mark.parametrize("first", ["compile", "make_reversible"])
def test_the_forward_of_compiled_blocks_is_compiled(first, monkeypatch):
    expected, graphs, ordinary = gradients(make_reversible(model(dropout=0.0))), [], torch.compile

    def backend(graph, examples):
        graphs.append({node.target for node in graph.graph.nodes})
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda forward, **_: ordinary(forward, backend=backend))
    torch.compiler.reset()
    net = model(dropout=0.0)
    for work in (make_reversible, compile_layers) if first == "make_reversible" else (compile_layers, make_reversible):
        work(net)
    found = gradients(net)
    assert any(F.scaled_dot_product_attention in graph for graph in graphs)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
    assert all(layer._compiled_call_impl is None for layer in net.layers)
    assert all(layer._compiled_call_impl is not None for layer in undo(net).layers)


def compile_layers(net):
    for layer in net.layers:
        layer.compile()


class Tuples(Block):
    """Returns more than its stream, and is called with a cache."""

    def forward(self, hidden, mask=None, cache=None):
        if cache is not None:
            cache.update(hidden)
        return super().forward(hidden, mask), {"seen": hidden.shape}


class Cache:
    def __init__(self):
        self.held = []

    def update(self, keys):
        self.held.append(keys)

    def get_seq_length(self):
        return sum(keys.shape[1] for keys in self.held)


class TupleModel(Model):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Tuples() for _ in range(4))
        self.cache = None

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x, others = layer(hidden=x, cache=self.cache)
            assert others == {"seen": x.shape}
        return self.head(x)


def test_a_cache_is_filled_where_nothing_runs_again():
    torch.manual_seed(0)
    net = make_reversible(TupleModel(), backward="autograd")
    net.cache = Cache()
    net(inputs()).sum().backward()
    assert len(net.cache.held) == 4


def test_tuples_streams_by_name_and_empty_caches():
    torch.manual_seed(0)
    net = TupleModel()
    expected = gradients(make_reversible(copy.deepcopy(net), backward="autograd"))
    net.cache = Cache()
    assert_equal(gradients(make_reversible(net)), expected)
    assert not net.cache.held
    assert repr(stack_of(net.layers[0])) == "ReversibleStack(4 blocks, 5.7 bits an element: 6, 5, 6; backward='reversible')"
    net.cache.update(torch.zeros(1, 2, 3))
    with pytest.raises(ValueError, match="past keys and values in training"):
        net(inputs())
    with torch.no_grad():
        net(inputs())
    assert len(net.cache.held) == 5


def test_blocks_run_again_once():
    net, calls = make_reversible(model()), []
    net.layers[2].norm1.register_forward_hook(lambda *_: calls.append(recomputing()))
    gradients(net, steps=1)
    assert calls == [False, True]


def stack_of_blocks(depth, *bits, **options):
    return ReversibleStack([nn.Linear(2, 2) for _ in range(depth)], *bits, **options)


@pytest.mark.parametrize(
    ("stack", "kept"),
    [
        (lambda: stack_of_blocks(30), "30 blocks, 4.2 bits an element: 6, 5, 25 x 4, 5, 6"),
        (lambda: stack_of_blocks(12, 2), "12 blocks, 3.8 bits an element: 6, 5, 4, 3, 3 x 2, 3, 4, 5, 6"),
        (lambda: stack_of_blocks(4, [1, 1, 1]), "4 blocks, 1 bit an element: 3 x 1"),
        (lambda: stack_of_blocks(1), "1 block, no bits"),
        (lambda: stack_of_blocks(3, backward="autograd"), "3 blocks, none rebuilt, computed as with 6 bits an element: 6, 6"),
        (lambda: stack_of_blocks(5, store=2), "5 blocks, of which 2 keep bits to be rebuilt, 5.5 bits an element: 6, 5"),
    ],
)
def test_a_stack_says_what_it_keeps(stack, kept):
    assert stack().kept == kept


def test_a_short_stack_keeps_the_same_with_one_to_three_bits_and_says_so():
    for depth in (3, 4):
        assert len({stack_of_blocks(depth, bits).kept for bits in (1, 2, 3)}) == 1


def test_a_model_says_what_its_stacks_keep_under_their_schedules():
    net = Two()
    assert kept_between_blocks(net) is None
    make_reversible(net, ["encoder", "decoder"])
    depths = [len(net.encoder), len(net.decoder)]
    assert kept_between_blocks(net) == "; ".join(stack_of_blocks(depth).kept for depth in depths)
    stack_of(net.encoder[0]).backward = "checkpoint"
    assert "none rebuilt" in kept_between_blocks(net).partition(";")[0]
    assert kept_between_blocks(undo(net)) is None


def growth(bits, depths=(12, 24)):
    """Bytes kept between forward and backward, for each element of a stream and block in the middle."""
    alive = []
    for depth in depths:
        torch.manual_seed(0)
        net = make_reversible(Model(depth, dropout=0.0), bits=bits)
        x = torch.randn(64, 5, 4)
        net(x).sum().backward()
        with TrackedMemory(net) as memory:
            loss = net(x).sum()
            alive.append(memory.alive)
        del loss
    return (alive[1] - alive[0]) / (depths[1] - depths[0]) / (64 * 5 * WIDTH)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_a_block_keeps_its_bits_and_nothing_else(bits):
    assert growth(bits) == pytest.approx(bits / 8, rel=0.1)


def test_memory_is_freed_with_the_graph():
    net = make_reversible(model())
    gradients(net)
    with TrackedMemory(net) as memory:
        net(inputs())
        before = memory.alive  # the largest magnitude of the streams, which the grid holds
        loss = net(inputs()).sum()
        assert memory.alive > before
        del loss
        assert memory.alive == before


class Changing(Model):
    """Does something around its blocks."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, x):
        x = first = self.stem(x)
        for index, layer in enumerate(self.layers):
            if self.what == "fails" and index == 3:
                raise ValueError
            if self.what == "detaches" and index == 3:
                x = x.detach()
            if self.what == "conditions":
                x = layer(x, mask=x.mean((0, 2)).expand(5, 5))
                continue
            if self.what == "casts":
                with torch.autocast("cpu", torch.bfloat16, enabled=index % 2 == 0):
                    x = layer(x, mask=self.mask)
                continue
            if self.what == "casts later":
                with torch.autocast("cpu", torch.bfloat16, enabled=index >= 2):
                    x = layer(x, mask=self.mask)
                continue
            if self.what == "freezes":
                with torch.set_grad_enabled(index != 2):
                    x = layer(x, mask=self.mask)
                continue
            if self.what == "adds" and index == 3:
                x = x + first
            x = layer(x)
        return self.head(x)


class Odd(Block):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, x, mask=None):
        y = super().forward(x, mask)
        return {"shorter": y[:, 1:], "mapping": {"stream": y}}[self.what]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("shorter", r"must keep the shape of its input: \(3, 5, 16\) became \(3, 4, 16\)"),
        ("mapping", "a tuple or list that begins with one, not dict"),
    ],
)
def test_blocks_that_cannot_be_coupled_are_refused(what, words):
    net = model()
    net.layers = nn.ModuleList(Odd(what) for _ in range(3))
    with pytest.raises(ValueError, match=words):
        make_reversible(net)(inputs())


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.ModuleList([Block(), Block()]), nn.ModuleList([Tuples(), Tuples()])


def shared():
    net = model()
    net.layers[1] = net.layers[0]
    return net


def shared_lists():
    net = Two()
    net.decoder[1] = net.encoder[1]
    return net


@pytest.mark.parametrize(
    ("made", "name", "words"),
    [
        (model, "layer", "'layer' is not a list of blocks; the model has layers"),
        (lambda: nn.Linear(2, 2), None, "Linear has no list of at least two equal blocks"),
        (Two, None, "several lists of blocks: encoder, decoder; name one"),
        (shared, "layers", "layers.0 and layers.1 are one block"),
        (shared_lists, ["encoder", "decoder"], "encoder.1 and decoder.1 are one block"),
        (lambda: make_reversible(model()), None, "reversible already"),
        (lambda: make_reversible(model(), "layers"), "layers.0.mlp", "'layers.0.mlp' are reversible already"),
    ],
)
def test_lists_that_are_not_there(made, name, words):
    with pytest.raises(ValueError, match=words):
        make_reversible(made(), name)


def test_a_list_itself_is_answered_with_its_name():
    net = model()
    with pytest.raises(ValueError, match=r"takes the name of a list of blocks \('layers'\), not the list itself"):
        make_reversible(net, net.layers)


def double(what=None, backward="reversible"):
    torch.manual_seed(0)
    return make_reversible(Changing(what).double(), backward=backward)


def live_tapes():
    gc.collect()
    return sum(type(each) is Tape for each in gc.get_objects())


@pytest.mark.parametrize("what", ["adds", "fails", "conditions"])
def test_a_forward_without_backward_leaves_nothing(what):
    """A block's keyword tensor may be computed from the stream, and the model may fail between two blocks."""
    net, before = double(what), live_tapes()
    for _ in range(3):
        with suppress(ValueError):
            net(inputs(torch.float64))
    stack_of(net.layers[0])._pass = None
    assert live_tapes() == before


@pytest.mark.parametrize("what", ["conditions", "casts", "freezes", "detaches"])
@pytest.mark.parametrize("backward", ["checkpoint", "reversible", "pareprop"])
def test_what_a_model_does_around_its_blocks(what, backward):
    expected = gradients(double(what, "autograd"))
    assert_equal(gradients(double(what, backward)), expected)


def test_settings_that_the_model_changes_within_a_checkpoint():
    """The forward of the stack then runs in a backward, where settings must be compared before each block."""
    torch.manual_seed(0)
    net = make_reversible(Changing("casts later"))
    gradients(net, steps=1)
    found = []
    for checkpointed in (False, True):
        net.zero_grad()
        torch.manual_seed(2)
        x = inputs().requires_grad_()
        (checkpoint(net, x, use_reentrant=False) if checkpointed else net(x)).sin().sum().backward()
        found.append({name: p.grad.clone() for name, p in net.named_parameters()})
    assert_equal(*found)


@pytest.mark.parametrize("what", ["freezes", "detaches"])
@pytest.mark.parametrize("amp", [False, True])
def test_a_gradient_that_the_model_stops_does_not_pass_by(what, amp):
    """A stream also reaches the block after the next."""
    net = make_reversible(Changing(what))
    found = gradients(net, amp=amp)
    assert all(found[name] is None for name in found if name.startswith(("stem", "layers.0", "layers.1")))
    assert found["layers.3.qkv.weight"].abs().max() > 0


def test_first_blocks_without_gradients_do_not_make_the_others_store():
    net, calls = make_reversible(model()), []
    net.layers[4].norm1.register_forward_hook(lambda *_: calls.append(recomputing()))
    x = net.stem(inputs())
    for index, layer in enumerate(net.layers):
        with torch.set_grad_enabled(index > 1):
            x = layer(x)
    x.sum().backward()
    assert calls == [False, True]


def test_backward_hooks_of_a_block_see_the_whole_gradient():
    net = double()
    gradients(net)
    seen, streams = [], []
    net.layers[2].register_full_backward_hook(lambda _, into, out: seen.append(out[0]))
    net.layers[2].register_forward_hook(lambda _, into, out: streams.append(out))
    y = net(inputs(torch.float64)).sin().sum()
    (whole,) = torch.autograd.grad(y, streams, retain_graph=True)
    y.backward()
    assert_equal(seen[-1], whole)


@pytest.mark.parametrize("first", [False, True])
def test_an_empty_batch(first):
    net = make_reversible(model())
    if not first:
        gradients(net)
    net(inputs()[:0]).sum().backward()
    expected = gradients(make_reversible(model(), backward="autograd"))
    assert_equal(gradients(net), expected)


@pytest.mark.parametrize("index", [0, 5])
def test_blocks_in_eval_among_others_are_refused(index):
    net = make_reversible(model())
    net.layers[index].eval()
    with pytest.raises(ValueError, match=rf"block {index} is in eval\(\) and others are in train"):
        net(inputs())


def test_what_a_block_returns_behind_its_stream_is_not_kept():
    net, others = model(), []
    net.layers = nn.ModuleList(Tuples() for _ in range(3))
    net.layers[1].forward = lambda x, mask=None: (Tuples.forward(net.layers[1], x, mask)[0], torch.zeros(5))
    make_reversible(net)
    x = net.stem(inputs())
    for layer in net.layers:
        x, other = layer(x)
        others.append(weakref.ref(other) if isinstance(other, torch.Tensor) else None)
        del other
    assert others[1]() is None


def test_second_derivatives():
    found = {}
    for backward in ("autograd", "checkpoint", "reversible"):
        net = double(backward=backward)
        gradients(net)
        torch.manual_seed(3)
        x = inputs(torch.float64).requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):  # the only one with a second derivative
            (grad,) = torch.autograd.grad(net(x).sin().sum(), x, create_graph=True)
        found[backward] = torch.autograd.grad(grad.square().sum(), list(net.layers.parameters()), allow_unused=True)
    assert_equal(found["checkpoint"], found["autograd"])
    assert_equal(found["reversible"], found["autograd"])


def test_several_forwards_and_a_retained_graph():
    found = {}
    for backward in ("autograd", "reversible"):
        net = double(backward=backward)
        gradients(net)
        net.zero_grad()
        torch.manual_seed(3)
        loss = sum(net(inputs(torch.float64)[rows] * scale).sin().sum() for rows, scale in ((slice(3), 1), (slice(1), 2)))
        loss.backward(retain_graph=True)
        loss.backward()
        found[backward] = {name: p.grad for name, p in net.named_parameters()}
    assert_equal(found["reversible"], found["autograd"])


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.point = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)

    def forward(self, x):
        return x + self.point(torch.tanh(self.wide(x)))


@pytest.mark.parametrize("layout", ["channels_last", "transposed", "expanded"])
def test_streams_of_any_layout(layout):
    x = torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = {
        "channels_last": x.to(memory_format=torch.channels_last),
        "transposed": x.transpose(2, 3),
        "expanded": x[:1].expand(2, -1, -1, -1),
    }[layout]
    found = {}
    for backward in ("autograd", "reversible"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Sequential(*(Convolutions() for _ in range(4)))).double()
        found[backward] = gradients(make_reversible(net, "0", backward=backward), x=x)
    assert_equal(found["reversible"], found["autograd"])


class Gated(Block):
    """Of another class, with small lists in it."""

    def __init__(self):
        super().__init__()
        self.adapters = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))


def of_two_kinds(**around):
    net = model()
    net.layers = nn.ModuleList([Block(), Gated(), Block(), Gated()])
    for name, part in around.items():
        net.add_module(name, part)
    return net


class Stage(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner = nn.ModuleList([kind(), kind()])


def stages_of_two_kinds():
    net = nn.Module()
    net.stages = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)), Stage(Block), Stage(Gated)])
    return net


@pytest.mark.parametrize(
    ("made", "found"),
    [
        (of_two_kinds, ["layers"]),
        (lambda: of_two_kinds(stem2=nn.Sequential(nn.Sequential(nn.ReLU()), nn.Linear(2, 2), nn.ReLU())), ["layers"]),
        (lambda: of_two_kinds(other=nn.ModuleList([Block(), Block()])), ["layers.1.adapters", "layers.3.adapters", "other"]),
        (stages_of_two_kinds, ["stages.1.inner", "stages.2.inner"]),
    ],
    ids=["alone", "beside layers", "beside another list", "stages"],
)
def test_the_list_that_the_stream_runs_through(made, found):
    if len(found) == 1:
        net = make_reversible(made())
        assert stack_of(net.layers[0]).blocks == list(net.layers)
        return
    with pytest.raises(ValueError, match=f"several lists of blocks: {', '.join(found)}; name one"):
        make_reversible(made())


def test_a_part_of_a_list():
    """The other blocks stay as they are."""
    found = {}
    for backward in ("autograd", "reversible"):
        net = make_reversible(model(), ["layers[1:3]", "layers[-2:]"], backward=backward)
        found[backward] = gradients(net)
        stacks = [stack_of(layer) for layer in net.layers]
        assert stacks[0] is stacks[3] is None
        assert stacks[1].blocks == list(net.layers[1:3])
        assert stacks[4].blocks == list(net.layers[4:])
    assert_equal(found["reversible"], found["autograd"])


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("layers[6:]", r"'layers\[6:\]' holds none of the 6 blocks of 'layers'"),
        ("layers[::2]", r"'layers\[::2\]' is not a list of blocks; the model has layers"),
        (["layers[:3]", "layers[2:]"], "layers.2 is in two lists"),
        (["layers", "layers[2:]"], "layers.2 is in two lists"),
    ],
)
def test_parts_of_a_list_that_cannot_be(names, words):
    with pytest.raises(ValueError, match=words):
        make_reversible(model(), names)


def test_parts_of_a_list_that_are_reversible_already_or_split():
    net = make_reversible(model(), "layers[:3]")
    make_reversible(net, "layers[3:]")
    with pytest.raises(ValueError, match=r"'layers\[2:4\]' are reversible already"):
        make_reversible(net, "layers[2:4]")
    with pytest.raises(ValueError, match="split replaces a whole list of blocks"):
        make_reversible(model(), "layers[1:]", split=lambda block: (block.outer, block.mlp))
