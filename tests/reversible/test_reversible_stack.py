"""Stacks of blocks that make_reversible and recompute found in a model: gradients, what they keep, and what the model stays."""

import copy
import pickle

import pytest
import small_stacks
import torch
from compared import assert_equal
from covering import name_of, pairwise
from small_stacks import BLOCKS, PLACES, USES, WIDTH, gradients, inputs, model, recomputed, reversible
from torch import nn

from holotrain.reversible import make_reversible, recompute, undo
from holotrain.reversible.stack import stack_of, stacks_in

MIXED = ["reversible", "reversible", "checkpoint", "autograd", "pareprop", "reversible"]
WAYS = {
    "checkpoint": (reversible, "checkpoint"),
    "reversible": (reversible, "reversible"),
    "pareprop": (reversible, "pareprop"),
    "attention kept": (reversible, "reversible+attention"),
    "a schedule a block": (reversible, MIXED),
    "recompute": (recomputed, "checkpoint"),
    "offload": (recomputed, "offload"),
}
DTYPES = {
    "fp64": (torch.float64, False),
    "fp32": (torch.float32, False),
    "bf16": (torch.bfloat16, False),
    "amp": (torch.float32, True),
}
FACTORS = {
    "way": [*WAYS],
    "around": PLACES,
    "block": [*BLOCKS],
    "use": [*USES],
    "dtype": [*DTYPES],
    "bits": [4, 1, 8, [1, 2, 3, 4, 5]],
}


@pytest.mark.filterwarnings("ignore:the model changes the stream")
@pytest.mark.parametrize(tuple(FACTORS), pairwise(*FACTORS.values()), ids=name_of)
def test_gradients_equal_those_of_stored_blocks(way, around, block, use, dtype, bits):
    make, backward = WAYS[way]
    dtype, amp = DTYPES[dtype]
    amp = amp and not around.startswith("casts")
    nets = [make(model(block, around, dtype), each, bits=bits) for each in ("autograd", backward)]
    expected, found = (gradients(net, use, amp=amp) for net in nets)
    assert_equal(found, expected)
    errors = [error.item() for stack in stacks_in(nets[1]) for error in stack.checks.errors]
    assert not any(errors)


def test_a_block_that_is_left_out_is_the_identity():
    """The blocks around it are coupled as if it was not there."""
    net, fewer = reversible(model(around="leaves out the third")), model(depth=5)
    fewer.load_state_dict({name: value for name, value in net.state_dict().items() if "layers.5" not in name})
    for index in (2, 3, 4):
        fewer.layers[index].load_state_dict(net.layers[index + 1].state_dict())
    reversible(fewer)
    wide, narrow = stack_of(net.layers[0]), stack_of(fewer.layers[0])
    narrow.bits = [wide.bits[index - 1] for index in (1, 3, 4, 5)]
    narrow.weights = [wide.weights[index] for index in (0, 1, 3, 4, 5)]
    for step in range(2):
        torch.manual_seed(step)
        found = net(inputs())
        torch.manual_seed(step)
        assert_equal(fewer(inputs()), found)
        found.sum().backward()  # which ends the pass


@pytest.mark.parametrize("plan", [[(5,), (0,)], [(0, 1), (4, 5)], [(4, 5), ()], [(3, 4, 5), (0, 1, 2)], [(), (1,)]], ids=str)
@pytest.mark.filterwarnings("ignore:the model changes the stream")
def test_forwards_that_leave_out_others(plan):
    """At random in each step, as two forwards before one backward, and before a checkpoint around the model."""
    found = {}
    for backward in ("autograd", "reversible"):
        net = reversible(backward=backward)
        forwards = 0

        def run(x, net=net):
            nonlocal forwards
            net.around, forwards = plan[forwards % 2], forwards + 1
            return net(x)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("small_stacks.AROUND", {without: small_stacks.leaving_out(*without) for without in plan})
            found[backward] = [gradients(net, "two forwards", run=run), gradients(net, steps=3, run=run)]
            if plan[1] == ():
                small_stacks.AROUND["stops"] = small_stacks.leaving_out(*plan[0])
                net.around = "stops"
                net(inputs())  # the checkpoint's forward ends it, and must not add to what it saves
                net.around = "nothing"
                found[backward].append(gradients(net, "within a checkpoint", steps=1))
        assert bool(stack_of(net.layers[0]).changed) == (plan == [(3, 4, 5), (0, 1, 2)])
    for ours, expected in zip(found["reversible"], found["autograd"], strict=True):
        assert_equal(ours, expected)


def test_a_changed_stream_is_warned_of_once_and_remembered():
    net = reversible(model(around="adds often"))
    with pytest.warns(
        UserWarning, match="changes the stream between block 0 and block 1, block 1 and block 2, block 4 and"
    ) as said:
        gradients(net, steps=3)
    stack = stack_of(net.layers[0])
    assert len(said) == 1 and stack.changed == {1, 2, 5}
    resumed = reversible(model(around="adds often"))
    stack_of(resumed.layers[0]).load_grid_state(stack.grid_state())
    assert_equal(gradients(resumed, steps=1), gradients(net, steps=1))


def test_an_edit_in_place_that_comes_later():
    net, plain = reversible(), reversible(model(around="writes"), "autograd")
    gradients(net)
    net.around = "writes"
    with pytest.raises(ValueError, match="in place between block 2 and block 3, .* it is from the next forward on"):
        net(inputs())
    stack_of(plain.layers[0]).load_grid_state(stack_of(net.layers[0]).grid_state())
    assert_equal(gradients(net), gradients(plain))


def test_the_model_stays_what_it_is():
    """In evaluation, in training without gradients, and after undo."""
    plain = model()
    names, before = list(plain.state_dict()), plain.eval()(inputs())
    expected = gradients(plain.train())
    net = reversible()
    gradients(net)
    assert list(net.state_dict()) == names
    assert [type(part) for part in net.modules()] == [type(part) for part in plain.modules()]
    assert_equal(net.eval()(inputs()), before)
    net.train()
    for part in net.modules():
        part.training = part.training and not isinstance(part, nn.Dropout)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert_equal(net(inputs()), before)
    assert (net(inputs()) - before).abs().max() > 1e-6
    loss = net.train()(inputs()).sum()
    undo(net)
    loss.backward()
    assert all("forward" not in vars(layer) for layer in net.layers)
    assert_equal(gradients(net), expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["deepcopy", "pickle"])
def test_a_copy_has_blocks_of_its_own(copied):
    net = reversible()
    gradients(net)
    twin = copied(net)
    assert stack_of(twin.layers[0]) is not stack_of(net.layers[0])
    assert stack_of(twin.layers[0]).blocks == list(twin.layers)
    assert_equal(gradients(twin, steps=1), gradients(net, steps=1))
    assert_equal(gradients(undo(twin)), gradients(undo(net)))


@pytest.mark.parametrize("way", WAYS)
def test_adapters_and_frozen_weights(way):
    make, backward = WAYS[way]
    found = []
    for each in ("autograd", backward):
        net = model()
        net.requires_grad_(False)
        for layer in net.layers[1:]:
            layer.outer = nn.Sequential(layer.outer, nn.Linear(WIDTH, WIDTH).double())
        found.append(gradients(make(net, each)))
    assert len(found[0]) == 2 * 10
    assert_equal(*found)


@pytest.mark.parametrize("first", ["compile", "make_reversible"])
def test_the_forward_of_compiled_blocks_is_compiled(first, monkeypatch):
    expected, graphs, ordinary = gradients(undo(reversible()).eval()), [], torch.compile

    def backend(graph, examples):
        graphs.append({node.target for node in graph.graph.nodes})
        return graph.forward

    def compile_layers(net):
        for layer in net.layers:
            layer.compile()

    monkeypatch.setattr(torch, "compile", lambda forward, **_: ordinary(forward, backend=backend))
    torch.compiler.reset()
    net = model()
    for work in (reversible, compile_layers) if first == "make_reversible" else (compile_layers, reversible):
        work(net)
    gradients(net)
    assert any(nn.functional.scaled_dot_product_attention in graph for graph in graphs)
    torch.testing.assert_close(gradients(net.eval()), expected)
    assert all(layer._compiled_call_impl is None for layer in net.layers)
    assert all(layer._compiled_call_impl is not None for layer in undo(net).layers)


@pytest.mark.parametrize("around", ["freezes the third", "detaches"])
def test_a_gradient_that_the_model_stops_does_not_pass_by(around):
    """A stream also reaches the block after the next."""
    found = gradients(reversible(model(around=around)), steps=1)
    assert not any(name.startswith(("0 stem", "0 layers.0", "0 layers.1")) for name in found)
    assert found["0 layers.3.qkv.weight"].abs().max() > 0


def test_backward_hooks_of_a_block_see_the_whole_gradient():
    net = reversible()
    gradients(net)
    seen, streams = [], []
    net.layers[2].register_full_backward_hook(lambda _, into, out: seen.append(out[0]))
    net.layers[2].register_forward_hook(lambda _, into, out: streams.append(out))
    y = net(inputs()).sin().sum()
    (whole,) = torch.autograd.grad(y, streams, retain_graph=True)
    y.backward()
    assert_equal(seen[-1], whole)


LAYOUTS = {
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3),
    "expanded": lambda x: x[:1].expand(2, -1, -1, -1),
    "sliced": lambda x: x.repeat(1, 1, 1, 2)[..., 6:],
}


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.point = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)

    def forward(self, x):
        return x + self.point(torch.tanh(self.wide(x)))


@pytest.mark.parametrize("make", [make_reversible, recompute])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_streams_of_any_layout(layout, make):
    x = LAYOUTS[layout](torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    found = []
    for backward in ("autograd", "reversible" if make is make_reversible else "checkpoint"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Sequential(*(Convolutions() for _ in range(4)))).double()
        found.append(gradients(make(net, "0", backward=backward), run=lambda _, net=net: net(x)))
    assert_equal(*found)


def test_a_part_of_a_list():
    """The other blocks stay as they are."""
    found = []
    for backward in ("autograd", "reversible"):
        net = make_reversible(model(), ["layers[1:3]", "layers[-2:]"], backward=backward)
        found.append(gradients(net))
        stacks = [stack_of(layer) for layer in net.layers]
        assert stacks[0] is stacks[3] is None
        assert stacks[1].blocks == list(net.layers[1:3]) and stacks[4].blocks == list(net.layers[4:])
    assert_equal(*found)


def test_a_list_that_is_split_into_two_streams_stays_a_list_and_comes_back():
    branches_of = lambda block: (nn.Sequential(block.norm1, block.mixer), nn.Sequential(block.norm2, block.inner, block.outer))  # noqa: E731
    net = model().eval()
    for layer in net.layers:
        layer.mixer = nn.Linear(WIDTH, WIDTH).double()
    before, names = net(inputs()), list(net.state_dict())
    x1 = x2 = net.stem(inputs())
    for f, g in map(branches_of, net.layers):
        x1 = x1 + f(x2)
        x2 = x2 + g(x1)
    net.forward = lambda x: net.layers[0](net.stem(x))
    make_reversible(net, "layers", split=branches_of)
    assert_equal(net(inputs()), (x1 + x2) / 2)
    assert len(net.layers) == 1
    del net.forward
    assert undo(net) is net
    assert_equal(net(inputs()), before)
    assert list(net.state_dict()) == names
