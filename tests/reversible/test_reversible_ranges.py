"""A profiler's trace shows the schedules: which block, what, in which order."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from holotrain.models.layers.blocks import ResidualBlock, ResidualSequence
from holotrain.reversible import ReversibleBlock, ReversibleSequence

DEPTH = 3
FORWARD = [f"forward {i}" for i in range(DEPTH)]


def branch():
    return nn.Sequential(nn.Linear(4, 4), nn.GELU())


def reversible(backward, **options):
    return ReversibleSequence([ReversibleBlock(branch(), branch()) for _ in range(DEPTH)], backward, **options)


def residual(backward):
    return ResidualSequence([ResidualBlock(branch(), branch()) for _ in range(DEPTH)], backward)


def step(net):
    streams = [torch.ones(2, 4, requires_grad=True) for _ in range(2 if isinstance(net, ReversibleSequence) else 1)]
    out = net(*streams)
    (sum(out) if isinstance(out, tuple) else out).square().sum().backward()


def names(run):
    """In order of their beginnings."""
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        run()
    named = [event for event in watched.events() if event.is_user_annotation]
    return [event.name for event in sorted(named, key=lambda event: event.time_range.start)]


def halves(*blocks):
    return [f"recompute {i}.{letter}" for i in blocks for letter in "gf"]


@pytest.mark.parametrize(
    ("net", "recomputed"),
    [
        *(
            (lambda backward=backward: reversible(backward), halves(2, 1, 0))
            for backward in ("checkpoint", "reversible", "pareprop")
        ),
        (lambda: reversible("reversible", store=[1]), halves(2, 0)),
        (lambda: reversible("autograd"), []),
        (lambda: residual("autograd"), []),
        (lambda: residual("checkpoint"), ["recompute 2", "recompute 1", "recompute 0"]),
    ],
)
def test_blocks_are_recomputed_from_the_last(net, recomputed):
    net = net()
    assert names(lambda: step(net)) == [*FORWARD, *recomputed]


def test_nothing_is_named_where_operations_are_counted():
    def counted():
        with FlopCounterMode(display=False):
            step(reversible("reversible"))

    assert not any(name.startswith(("forward", "recompute")) for name in names(counted))


@pytest.mark.parametrize("backward", ["autograd", "checkpoint"])
def test_a_compiled_model_is_whole_and_not_compiled_anew_for_a_profiler(backward):
    compilations = []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph

    net = torch.compile(residual(backward), backend=backend, fullgraph=True)
    x = torch.ones(2, 4, requires_grad=True)
    net(x).sum().backward()
    seen = names(lambda: net(x).sum().backward())
    assert len(compilations) == 1 and not any(name.startswith("forward") for name in seen)
