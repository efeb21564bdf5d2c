"""A profiler's trace shows the schedules: which block, what, in which order."""

import pytest
import torch
from torch import nn
from torch.profiler import profile

from holotrain.models.layers.blocks import ResidualBlock, ResidualSequence
from holotrain.reversible import ReversibleBlock, ReversibleSequence
from holotrain.reversible.context import in_trace

DEPTH = 3
FORWARD = [f"forward {i}" for i in range(DEPTH)]


def branch():
    return nn.Sequential(nn.Linear(4, 4), nn.GELU())


def reversible(backward, **options):
    torch.manual_seed(0)
    return ReversibleSequence([ReversibleBlock(branch(), branch()) for _ in range(DEPTH)], backward, **options)


def step(net):
    streams = [torch.ones(2, 4, requires_grad=True) for _ in range(2)]
    sum(y.square().sum() for y in net(*streams)).backward()
    return [parameter.grad for parameter in net.parameters()]


def ranges(run, **options):
    """Names in order of their beginnings, with threads, and the time of each."""
    with profile(activities=[torch.profiler.ProfilerActivity.CPU], **options) as watched:
        run()
    named = [event for event in watched.events() if event.is_user_annotation]
    return sorted(named, key=lambda event: event.time_range.start)


def names(run, **options):
    return [event.name for event in ranges(run, **options)]


def recomputed(*blocks):
    return [f"recompute {i}.{letter}" for i in blocks for letter in "gf"]


@pytest.mark.parametrize("backward", ["checkpoint", "reversible", "pareprop"])
def test_blocks_are_recomputed_half_by_half_from_the_last(backward):
    assert names(lambda: step(reversible(backward))) == [*FORWARD, *recomputed(2, 1, 0)]


def test_blocks_keep_their_numbers_where_others_are_stored():
    assert names(lambda: step(reversible("reversible", store=[1]))) == [*FORWARD, *recomputed(2, 0)]


def test_stored_blocks_have_a_forward_alone():
    assert names(lambda: step(reversible("autograd"))) == FORWARD


@pytest.mark.parametrize("backward", ["autograd", "checkpoint"])
def test_plain_blocks(backward):
    net = ResidualSequence([ResidualBlock(branch(), branch()) for _ in range(DEPTH)], backward)
    again = [f"recompute {i}" for i in reversed(range(DEPTH))] if backward == "checkpoint" else []
    assert names(lambda: net(torch.ones(2, 4, requires_grad=True)).sum().backward()) == [*FORWARD, *again]


def test_nothing_is_named_without_a_profiler_or_where_operations_are_counted():
    from torch.utils.flop_counter import FlopCounterMode

    assert not isinstance(in_trace("forward", 0), torch.profiler.record_function)
    with profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert isinstance(in_trace("forward", 0), torch.profiler.record_function)
        with FlopCounterMode(display=False):
            assert not isinstance(in_trace("forward", 0), torch.profiler.record_function)


@pytest.mark.parametrize("backward", ["autograd", "checkpoint"])
def test_a_compiled_model_is_whole_and_not_compiled_anew_for_a_profiler(backward):
    compilations = []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph

    net = ResidualSequence([ResidualBlock(branch(), branch()) for _ in range(DEPTH)], backward)
    net = torch.compile(net, backend=backend, fullgraph=True)
    x = torch.ones(2, 4, requires_grad=True)
    net(x).sum().backward()
    seen = names(lambda: net(x).sum().backward())
    assert len(compilations) == 1 and not any(name.startswith("forward") for name in seen)
