"""A profiler's trace shows the schedules: which block, what, in which order."""

import pytest
import torch
from compared import assert_equal
from torch import nn
from torch.profiler import profile

from holotrain.models.layers.residual import ResidualBlock, ResidualSequence
from holotrain.reversible import ReversibleBlock, ReversibleSequence, trial
from holotrain.reversible.ranges import in_trace

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


def half(number, letter):
    return [f"recompute {number}.{letter}", f"gradients {number}.{letter}"]


def test_reversible_recomputes_and_differentiates_half_by_half_from_the_last():
    backward = [name for i in reversed(range(DEPTH)) for letter in "gf" for name in half(i, letter)]
    assert names(lambda: step(reversible("reversible"))) == [*FORWARD, *backward]


def test_blocks_keep_their_numbers_where_others_are_stored():
    backward = [name for i in (2, 0) for letter in "gf" for name in half(i, letter)]
    assert names(lambda: step(reversible("reversible", store=[1]))) == [*FORWARD, *backward]


def test_checkpointed_blocks_are_recomputed_whole():
    assert names(lambda: step(reversible("checkpoint"))) == [*FORWARD, "recompute 2", "recompute 1", "recompute 0"]


def test_stored_blocks_have_a_forward_alone():
    assert names(lambda: step(reversible("autograd"))) == FORWARD


@pytest.mark.parametrize("backward", ["autograd", "checkpoint"])
def test_plain_blocks(backward):
    net = ResidualSequence([ResidualBlock(branch(), branch()) for _ in range(DEPTH)], backward)
    again = [f"recompute {i}" for i in reversed(range(DEPTH))] if backward == "checkpoint" else []
    assert names(lambda: net(torch.ones(2, 4, requires_grad=True)).sum().backward()) == [*FORWARD, *again]


def test_overlapped_recomputations_appear_on_the_worker(monkeypatch):
    monkeypatch.setattr(trial, "may_overlap", lambda device: True)
    monkeypatch.setattr(trial.Trial, "overlap", lambda self: True)
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    seen = ranges(lambda: step(reversible("pareprop")), experimental_config=everywhere)
    threads = {kind: {e.thread for e in seen if e.name.startswith(kind)} for kind in ("forward", "recompute", "gradients")}
    assert threads["forward"] == threads["gradients"] and not threads["forward"] & threads["recompute"]
    when = {event.name: event.time_range for event in seen}
    for i in range(DEPTH):
        for letter in "gf":  # no half is differentiated before it is there again
            assert when[f"recompute {i}.{letter}"].end <= when[f"gradients {i}.{letter}"].start


@pytest.mark.parametrize("backward", ["autograd", "checkpoint", "reversible", "pareprop"])
def test_watching_changes_no_gradient(backward):
    alone = step(reversible(backward))
    watched = []
    names(lambda: watched.extend(step(reversible(backward))))
    assert_equal(alone, watched)


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
