"""The cost of each schedule of a block: bytes kept for the backward, and time or FLOPs."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from holotrain.planning.allocators import ALLOCATORS, Allocator
from holotrain.planning.choice import Option, Stage
from holotrain.planning.clock import clock_of
from holotrain.planning.ledger import Ledger
from holotrain.planning.rehearsal import Blocks, TrainingStep

CPU = ALLOCATORS["cpu"]

ROUNDS = 5
"""Measurements of each option after the first run, in turn with the other options."""

BLOCKS = 2
"""Number of consecutive blocks that are timed, so that recomputation can run ahead from one to the other."""


@dataclass(frozen=True)
class Visit:
    """A sequence of blocks and the arguments of a call."""

    sequence: Blocks
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def visits_of(step: TrainingStep) -> list[Visit]:
    """The calls of the sequences in a forward of the step, which is run without gradients."""
    visits: list[Visit] = []

    def record(sequence: Blocks, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        visits.append(Visit(sequence, args, kwargs))

    handles = [
        sequence.ends[0].register_forward_pre_hook(partial(record, sequence), with_kwargs=True) for sequence in step.sequences
    ]
    with torch.no_grad(), step.autocast():
        step.loss()
    for handle in handles:
        handle.remove()
    return visits


def stage_of(
    visit: Visit,
    costs: dict[str, float],
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    allocator: Allocator = CPU,
) -> Stage:
    """Returns the options of a sequence's blocks, based on its first block, without options that are worse in memory and cost.

    Call it inside :func:`~holotrain.planning.imagined`, with the visit's tensors.

    Args:
        costs: cost of each schedule to consider.
    """
    options = [Option(name, _held(visit, name, autocast, allocator), cost) for name, cost in costs.items()]
    worth = [
        option
        for option in options
        if not any(other.held <= option.held and other.cost < option.cost for other in options if other is not option)
    ]
    return Stage(len(visit.sequence.blocks), worth)


def _held(visit: Visit, name: str, autocast: Callable[[], AbstractContextManager], allocator: Allocator) -> int:
    """Bytes that one more block keeps after the forward."""
    alive = []
    for depth in (1, 2):
        ledger = Ledger(allocator)
        args, kwargs = _leaves(visit)
        ledger.label("given", (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)))
        sequence = visit.sequence.again(depth, name)
        ledger.label("parameters", sequence.parameters())
        with ledger.watching(), autocast():
            output = sequence(*args, **kwargs)
        alive.append(ledger.alive)
        del output
    return alive[1] - alive[0]


def flops(visit: Visit, names: Sequence[str]) -> dict[str, float]:
    """FLOPs of one block's forward and backward with recomputation, two per multiply-add."""
    counted = {}
    for name in names:
        with FlopCounterMode(display=False) as counter:
            _run(visit.sequence.again(1, name), visit)
        counted[name] = float(counter.get_total_flops())
    return counted


def seconds(
    visit: Visit, names: Sequence[str], autocast: Callable[[], AbstractContextManager] = nullcontext
) -> dict[str, float]:
    """Seconds of one block's forward and backward on the device of the visit's tensors, as medians."""
    device = visit.args[0].device
    sequences = {name: copy.deepcopy(visit.sequence.again(BLOCKS, name)) for name in names}
    clock = clock_of(device)
    marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in names}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for _ in range(1 + ROUNDS):
            for name, sequence in sequences.items():
                begun = clock.mark()
                _run(sequence, visit, autocast)
                marks[name].append((begun, clock.mark()))
    return {
        name: statistics.median(clock.seconds(*pair, wait=True) for pair in pairs[1:]) / BLOCKS for name, pairs in marks.items()
    }


def _run(sequence: nn.Module, visit: Visit, autocast: Callable[[], AbstractContextManager] = nullcontext) -> None:
    args, kwargs = _leaves(visit)
    with autocast():
        result = sequence(*args, **kwargs)
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])


def _leaves(visit: Visit) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns detached arguments; the streams require gradients, as they do inside a model."""
    args = tuple(
        arg.detach().requires_grad_() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in visit.args
    )
    detached = tree_map_only(Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), visit.kwargs)
    return args, detached
