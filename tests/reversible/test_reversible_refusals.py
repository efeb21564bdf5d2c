"""What cannot be right is refused, by name: when blocks are made, at the first forward, or in the backward."""

import copy
import pickle

import pytest
import torch
from compared import assert_equal
from engine_branches import WIDTH, Branch
from engine_cases import sequence
from small_stacks import Block, Model, gradients, inputs, model, recomputed
from torch import nn

from holotrain.reversible import ReversibleBlock, ReversibleSequence, recompute, undo
from holotrain.reversible.in_place import RecomputedForward
from holotrain.reversible.tiled_loss import tile_loss
from holotrain.schedules import SCHEDULES


def streams():
    return torch.randn(2, 2, 3, WIDTH, dtype=torch.float64).requires_grad_().unbind()


def call(*given, change=None, **keywords):
    """A sequence's forward and backward."""
    net = sequence(2, backward=keywords.pop("backward", "reversible"))
    if change is not None:
        change(net)
    return sum(net(*(given or streams()), **keywords)).sum().backward()


def with_branch(branch, backward="reversible"):
    net = ReversibleSequence([ReversibleBlock(branch, nn.Identity())], backward)
    return sum(net(*(torch.randn(3, WIDTH, requires_grad=True) * 1, torch.randn(3, WIDTH)))).sum().backward()


class Lambda(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x, **keywords):
        return self.function(x, **keywords)


class Other(ReversibleBlock):
    def forward(self, x1, x2, **keywords):
        return x2, x1


def hooked(kind, hook, index=0):
    return lambda net: getattr(net.blocks[index], kind)(hook) and None


def edit(module, given, output=None):
    with torch.no_grad():
        (given if output is None else output)[1].mul_(2)


def report(x, log=None):
    log.append(x.mean())
    return x.sin()


def compiled(net):
    net.keep = ["attention"]
    net.blocks[0].f.compile(backend="eager")


def edited_output(backward):
    y1, y2 = sequence(2, backward=backward)(*streams())
    y1.add_(1)
    (y1 * y2).sum().backward()


def switched(backward):
    net = sequence(2, backward=backward)
    loss = sum(net(*streams())).sum()
    net.eval()
    loss.backward()


def changed_after_use():
    """The stream that a block has read, by the model."""
    net = recomputed()
    x = net.stem(inputs())
    for number, layer in enumerate(net.layers):
        before, x = x, layer(x)
        if number == 3:
            before.mul_(3)
    x.sum().backward()


class Gated(Block):
    """Of another class, with small lists in it."""

    def __init__(self):
        super().__init__()
        self.adapters = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))


def of_two_kinds(**beside):
    """The stream runs through one list of blocks of two classes."""
    net = Model(lambda: None, 0)
    net.layers = nn.ModuleList([Block(), Gated(), Block(), Gated()])
    for name, part in beside.items():
        net.add_module(name, part)
    return net


def options(**given):
    return lambda: ReversibleSequence(sequence(2).blocks, **given)


PRE, POST = "register_forward_pre_hook", "register_forward_hook"
EDITED, REPLACED = "modified by an inplace operation", "replaced the inputs or outputs of a ReversibleBlock"
REFUSED = [
    (options(backward="revresible"), ", ".join(SCHEDULES)),
    (options(store=3), "up to 2"),
    (options(store=True), "not True"),
    (options(store=[0, 2]), "indices below 2"),
    (options(keep=["atention"]), "attention"),
    (options(keep=["aten._to_copy.default"]), "autocast"),
    (options(keep=["aten.native_dropout.default"]), "draw no random numbers"),
    (options(exact=-3), "exact must be"),
    (options(tile="512"), "tile must be a number of tokens or None, not"),
    (lambda: ReversibleSequence([Other(Branch(), Branch())]), "overrides forward"),
    (lambda: call(f_kwargs=[{}, {}, {}]), "for 3 blocks of 2"),
    (lambda: call(torch.zeros(2, 4), torch.zeros(2, 4).double()), "same shape"),
    *((lambda b=b: with_branch(Lambda(lambda x: x[..., :1]), b), "preserve the shape") for b in ("checkpoint", "reversible")),
    (lambda: with_branch(Lambda(torch.Tensor.double), "pareprop"), "dtype"),
    (lambda: with_branch(nn.LSTM(WIDTH, WIDTH)), "return one tensor"),
    (lambda: with_branch(nn.ReLU(inplace=True)), "changed its input in place"),
    (
        lambda: call(change=lambda net: setattr(net.blocks[0], "f", Lambda(report)), f_kwargs=[{"log": []}, {}]),
        "changed a list or dict",
    ),
    (lambda: edited_output("reversible"), EDITED),  # a checkpoint stores others
    *((lambda b=b: switched(b), "switch after the backward") for b in ("checkpoint", "reversible")),
    (lambda: call(change=hooked(POST, lambda m, i, out: (out[0] * 2, out[1]))), REPLACED),
    (lambda: call(*torch.rand(2, WIDTH, WIDTH).double(), change=hooked(PRE, lambda m, i: (i[0].T, i[1].T, *i[2:]))), REPLACED),
    *(
        (lambda kind=kind: call(change=hooked(kind, edit, 1)), "inputs or outputs of a ReversibleBlock in place")
        for kind in (POST, PRE)
    ),
    (lambda: call(change=compiled), "compiled branches"),
    # blocks of other models
    (changed_after_use, EDITED),
    (lambda: recompute(nn.Linear(2, 2)), "Linear has no list of at least two equal blocks"),
    (lambda: recompute(of_two_kinds(other=nn.ModuleList([Block(), Block()]))), "layers.1.adapters, .*, other; name one"),
    (lambda: recompute(model(), "layers[6:]"), r"'layers\[6:\]' holds none of the 6 blocks of 'layers'"),
    (lambda: recompute(model(), "layers[::2]"), r"'layers\[::2\]' is not a list of blocks; the model has layers"),
    (lambda: recompute(net := model(), net.layers), r"takes the name of a list of blocks \('layers'\), not the list itself"),
    (lambda: recompute(model(), backward=["checkpoint"]), "backward lists 1 schedule for 6 blocks"),
    (lambda: recompute(sequence(2)), "the blocks are those of a ReversibleSequence, .* set sequence.backward"),
    (lambda: tile_loss(nn.Linear(2, 2)), "Linear is no language model of transformers"),
]


@pytest.mark.parametrize(("do", "words"), REFUSED, ids=[f"{number} {words[:40]}" for number, (_, words) in enumerate(REFUSED)])
def test_refused(do, words):
    with pytest.raises((ValueError, TypeError, RuntimeError, AttributeError), match=words):
        do()


def test_a_wrong_option_changes_nothing():
    net = model()
    for change in (lambda: recompute(net, tile=0), lambda: recompute(net, backward="x")):
        with pytest.raises(ValueError):
            change()
    assert all("forward" not in vars(part) for part in net.modules())


def test_the_list_that_the_stream_runs_through():
    net = of_two_kinds(stem2=nn.Sequential(nn.Sequential(nn.ReLU()), nn.Linear(2, 2), nn.ReLU()))
    assert [name for name, part in recompute(net).named_modules() if RecomputedForward.of(part)] == [
        f"layers.{number}" for number in range(4)
    ]


def test_half_precision_streams_are_warned_of():
    net = sequence(2, backward="reversible").bfloat16()
    with pytest.warns(UserWarning, match="streams of torch.bfloat16"):
        net(*(stream.bfloat16() for stream in streams()))


# Beside others that wrap or copy blocks: accelerate, nn.DataParallel.


@pytest.fixture
def hooks():
    return pytest.importorskip("accelerate").hooks


def wrapped(net, hooks):
    for layer in net.layers:
        hooks.add_hook_to_module(layer, hooks.ModelHook())
    return net


def unwrapped(net, hooks):
    for layer in net.layers:
        hooks.remove_hook_from_module(layer)
    return net


def test_a_wrapped_forward_is_found_and_undone(hooks):
    plain, net = gradients(model()), wrapped(recomputed(), hooks)
    assert all(map(RecomputedForward.of, net.layers))
    assert_equal(gradients(net), plain)
    undo(net)
    assert not any(map(RecomputedForward.of, net.layers))
    assert_equal(gradients(net), plain)
    assert_equal(gradients(recomputed(net)), plain)
    unwrapped(undo(net), hooks)
    assert_equal(gradients(net), plain)
    net = undo(unwrapped(wrapped(recomputed(), hooks), hooks))  # the wrapper goes before undo
    assert all("forward" not in vars(layer) for layer in net.layers)
    assert_equal(gradients(net), plain)


def replica_of(net):
    """What nn.DataParallel makes for each GPU: its parameters are attributes, copies with a graph."""
    modules = list(net.modules())
    copies = {id(module): module._replicate_for_data_parallel() for module in modules}
    for module in modules:
        twin = copies[id(module)]
        for name, child in module._modules.items():
            setattr(twin, name, copies[id(child)])
        for name, parameter in module._parameters.items():
            setattr(twin, name, parameter * 1)
    return copies[id(net)]


@pytest.mark.parametrize("copied", [lambda net: net, copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_replicas_of_data_parallel_are_refused(copied):
    net = copied(recomputed())
    with pytest.raises(ValueError, match="start one process for each GPU with torchrun, or .* CUDA_VISIBLE_DEVICES=0"):
        replica_of(net)
    undo(net)
    assert_equal(gradients(net, run=lambda x: replica_of(net)(x)), gradients(model()))


@pytest.mark.parametrize(("backward", "exact"), [("checkpoint", False), ("reversible", True), ("pareprop", False)])
def test_replicas_of_a_sequence_run_their_own_parts(backward, exact):
    branches = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(6)]
    net = ReversibleSequence(map(ReversibleBlock, branches[:3], branches[3:]), backward, exact=exact).double()
    expected = gradients(net, run=lambda x: torch.cat(net(x, x.sin())))
    assert_equal(gradients(net, run=lambda x: torch.cat(replica_of(net)(x, x.sin()))), expected)
