"""Blocks beside others that wrap, copy, compile, script or hook them: accelerate, nn.DataParallel, compilers."""

import copy
import pickle

import pytest
import torch
import torch._dynamo.testing
from compared import assert_equal
from small_stacks import WIDTH, gradients, inputs, model, reversible
from torch import nn

from holotrain.reversible import ReversibleBlock, ReversibleSequence, undo
from holotrain.reversible.stack import stack_of, stacks_in


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
    plain, coupled = gradients(model()), gradients(reversible())
    net = wrapped(reversible(), hooks)
    assert stacks_in(net) == [stack_of(net.layers[3])]
    assert_equal(gradients(net), coupled)
    undo(net)
    assert not stacks_in(net)
    assert_equal(gradients(net), plain)
    assert_equal(gradients(reversible(net)), coupled)
    unwrapped(undo(net), hooks)
    assert_equal(gradients(net), plain)
    assert_equal(gradients(reversible(net)), coupled)
    net = undo(unwrapped(wrapped(reversible(), hooks), hooks))  # the wrapper goes before undo
    assert all("forward" not in vars(layer) for layer in net.layers)
    assert_equal(gradients(net), plain)


def test_a_stack_of_copies_leaves_a_wrapper_behind(hooks):
    net = wrapped(reversible(), hooks)
    chain = stack_of(net.layers[0]).again(3, "reversible")
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    for _ in range(2):
        chain(x).sum().backward()
    assert stack_of(chain.blocks[0]).blocks == list(chain.blocks)
    assert stack_of(net.layers[0]).grid_state() is None  # it has not run


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
    net = copied(reversible())
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


@pytest.mark.parametrize("backward", ["checkpoint", "reversible", "pareprop"])
def test_hooks_that_are_there_in_the_forward_alone(backward):
    expected = gradients(reversible(model(around="hooks for the forward"), "autograd"))
    net = reversible(model(around="hooks for the forward"), backward)
    assert_equal(gradients(net), expected)
    assert not any(layer.inner._forward_pre_hooks or layer.inner._forward_pre_hooks_with_kwargs for layer in net.layers)


def test_scripting_says_what_to_do():
    with pytest.raises(AttributeError, match=r"torch.jit.script cannot .* call undo\(model\) first, or use torch.export"):
        torch.jit.script(reversible().layers[0])
    net = reversible().eval()
    assert_equal(torch.jit.trace(net, inputs())(inputs(seed=2)), net(inputs(seed=2)))


def test_a_compiled_model_is_compiled_once_for_all_blocks():
    frames = torch._dynamo.testing.CompileCounter()
    torch.compiler.reset()
    found = []
    for compiled in (False, True):
        net = reversible(model(depth=12))
        run = torch.compile(net, backend=frames) if compiled else net
        with torch._dynamo.config.patch(error_on_recompile=True):
            found.append(gradients(net, run=lambda x, run=run: run(inputs())))
    assert_equal(*found)
    torch.compiler.reset()
    frames.clear()
    evaluated = torch.compile(net.eval(), backend=frames, fullgraph=True)
    assert_equal(evaluated(inputs()), model(depth=12).eval()(inputs()))
    assert frames.frame_count == 1
    torch.compiler.reset()
