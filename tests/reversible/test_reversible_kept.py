"""What stacks of blocks keep between their blocks: bits, grids and memory."""

import gc

import pytest
import torch
from compared import assert_equal
from small_stacks import TOKENS, WIDTH, Block, Model, gradients, inputs, model, recomputed, reversible
from torch import nn
from tracked_memory import TrackedMemory

from holotrain.reversible.context import recomputing
from holotrain.reversible.stack import ReversibleStack, stack_of


def blocks_alone(depth, *bits, **options):
    return ReversibleStack([nn.Linear(2, 2) for _ in range(depth)], *bits, **options)


def float32(**options):
    return reversible(model(dtype=torch.float32), **options)


@pytest.mark.parametrize(
    "state", [{}, {"step": 0.3, "dtype": "float32"}, {"step": 0.5, "dtype": "int8"}, {"step": -1.0, "dtype": "float32"}]
)
def test_no_grid_of_a_training(state):
    with pytest.raises(ValueError, match="not the grid"):
        stack_of(reversible().layers[0]).load_grid_state(state)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("use", ["once", "retained graph"])
def test_streams_with_few_very_large_elements_are_kept_in_fp64(use, large):
    """As in Llama: a few channels are 10,000 times as large as the others. Those of a first batch always are."""
    found = []
    for backward in ("autograd", "reversible"):
        net = float32(backward=backward)
        with torch.no_grad():
            net.stem.bias[3] += 1e4 * large
        found.append(gradients(net, use))
        stack = stack_of(net.layers[0])
        assert (stack.stream_dtype == torch.float64) == large
        assert not large or stack.grid_state()["step"] < 1e-6
        assert net(inputs(torch.float32)).dtype == torch.float32
    assert_equal(*found)


@pytest.mark.parametrize("first", ["nothing", "zeros", "no samples"])
def test_the_grid_is_chosen_by_the_first_batch_that_says_something(first):
    found = []
    for backward in ("autograd", "reversible"):
        net = float32(backward=backward)
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                parameter.mul_(0 if first == "zeros" and name.endswith("bias") else 1)
        x = {"nothing": inputs()[:0], "zeros": 0 * inputs(), "no samples": inputs()[:, :0]}[first].float()
        if first != "no samples":
            net(x).sum().backward()
        found.append(gradients(net))
    assert_equal(*found)


@pytest.mark.parametrize("make", [reversible, recomputed])
@pytest.mark.parametrize("around", ["nothing", "freezes the first"])
def test_blocks_run_again_once(make, around):
    """Also where the first ones run without gradients."""
    net, calls = make(model(around=around)), []
    net.layers[4].norm1.register_forward_hook(lambda *_: calls.append(recomputing()))
    gradients(net, steps=1)
    assert calls == [False, True]


@pytest.mark.parametrize(
    ("stack", "kept"),
    [
        (lambda: blocks_alone(30), "30 blocks, 4.2 bits an element: 6, 5, 25 x 4, 5, 6"),
        (lambda: blocks_alone(12, 2), "12 blocks, 3.8 bits an element: 6, 5, 4, 3, 3 x 2, 3, 4, 5, 6"),
        (lambda: blocks_alone(4, [1, 1, 1]), "4 blocks, 1 bit an element: 3 x 1"),
        *((lambda bits=bits: blocks_alone(3, bits), "3 blocks, 6 bits an element: 6, 6") for bits in (1, 2, 3)),
        (lambda: blocks_alone(3, 8), "3 blocks, 8 bits an element: 8, 8"),
        (lambda: blocks_alone(1), "1 block, no bits"),
        (lambda: blocks_alone(3, backward="autograd"), "3 blocks, none rebuilt, computed as with 6 bits an element: 6, 6"),
        (lambda: blocks_alone(5, store=2), "5 blocks, of which 2 keep bits to be rebuilt, 5.5 bits an element: 6, 5"),
    ],
)
def test_a_stack_says_what_it_keeps(stack, kept):
    assert stack().kept == kept
    assert repr(stack()).startswith(f"ReversibleStack({kept}; backward=")


def bytes_kept(net, x):
    net(x).sum().backward()
    with TrackedMemory(net) as memory:
        loss = net(x).sum()
        alive = memory.alive
        loss.backward()
        del loss
        assert memory.alive <= x.nbytes + 100  # nothing stays
    return alive


@pytest.mark.parametrize(
    ("make", "option", "bits"), [*((reversible, bits, bits) for bits in (1, 2, 3, 4)), (recomputed, 0, 32)]
)
def test_a_block_keeps_its_bits_and_nothing_else(make, option, bits):
    """In the middle of the stack."""
    x = torch.randn(64, TOKENS, 4)
    nets = [make(Model(lambda: Block(dropout=0.0), depth), bits=option) for depth in (12, 24)]
    alive = [bytes_kept(net, x) for net in nets]
    assert (alive[1] - alive[0]) / 12 / (64 * TOKENS * WIDTH) == pytest.approx(bits / 8, rel=0.1)


@pytest.mark.parametrize("around", ["nothing", "adds", "stops early", "a mask from the stream"])
@pytest.mark.filterwarnings("ignore:the model changes the stream")
def test_memory_is_freed_with_the_graph(around):
    net = reversible(model(around=around))
    gradients(net)
    net.around = "nothing"
    net(inputs()).sum().backward()
    net.around = around
    with TrackedMemory(net) as memory:
        for backward in (False, True):
            loss = net(inputs()).sum()
            assert memory.alive > 1000
            if backward:
                loss.backward()
            del loss
            if around == "stops early" and not backward:
                net.around = "nothing"  # only the next forward can tell
                net(inputs()).sum().backward()
            gc.collect()
            assert memory.alive < 1000


class Tuples(Block):
    """Takes its stream by keyword, fills a cache, and returns more than tensors; alone, only a second tensor is used."""

    def forward(self, hidden, cache=None):
        if cache is not None:
            cache.update(hidden)
        return super().forward(hidden), {"seen": hidden.shape}, hidden.sin()


class Cache:
    def __init__(self):
        self.held = []

    def update(self, keys):
        self.held.append(keys)

    def get_seq_length(self):
        return sum(keys.shape[1] for keys in self.held)


class TupleModel(Model):
    cache, aside = None, False

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers[: 3 if self.aside else None]:
            x, others, aside = layer(hidden=x, cache=self.cache)
            assert others == {"seen": aside.shape}
        return self.head(aside if self.aside else x)


def tuple_model(backward):
    return reversible(TupleModel(Tuples, 4).double(), backward)


@pytest.mark.parametrize("aside", [False, True])
def test_tuples_streams_by_name_and_caches(aside):
    """A cache is filled where nothing runs again."""
    plain, net = tuple_model("autograd"), tuple_model("reversible")
    plain.aside = net.aside = aside
    net.cache = Cache()
    assert_equal(gradients(net), gradients(plain))
    assert not net.cache.held
    plain.cache = Cache()
    plain(inputs()).sum().backward()
    assert len(plain.cache.held) == (3 if aside else 4)
    net.cache.update(torch.zeros(1, 2, 3))
    with pytest.raises(ValueError, match="past keys and values in training"):
        net(inputs())
    with torch.no_grad():
        net(inputs())
    assert len(net.cache.held) == (4 if aside else 5)
