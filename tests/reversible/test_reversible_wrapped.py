"""Blocks beside others that wrap or copy them: accelerate, nn.DataParallel."""

import copy
import pickle

import pytest
import torch
from compared import assert_equal
from small_stacks import gradients, model, recomputed
from torch import nn

from holotrain.reversible import ReversibleBlock, ReversibleSequence, undo
from holotrain.reversible.in_place import RecomputedForward


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
