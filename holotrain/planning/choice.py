"""Chooses what each block stores, so that a step fits a budget and takes the least time.

A block can store or recompute its activations in several ways, which cost memory or time; both are measured or counted here.
The choice for all blocks is a knapsack problem. It is solved exactly under the assumption that the memory of blocks adds up.
The real peak is lower, because what the last blocks store is free again when the first are recomputed. So each choice is
simulated, and memory that is left is used in another round.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from holotrain.clock import Clock
from holotrain.optimizers import InBackward
from holotrain.planning.devices import CPU, Allocator
from holotrain.planning.tracker import AllocationTracker
from holotrain.planning.training_step import TrainingStep

CELLS = 2000
"""Number of cells that the available memory is divided into; the memory of a block is rounded up to whole cells."""

MARGIN = 0.002
"""Of a budget, left free for small temporaries of operations, which neither the peak nor the bound of a plan includes."""

ROUNDS = 6
"""The most simulations of a choice, in addition to those of the smallest and the fastest choice."""


@dataclass(frozen=True)
class Option:
    """One schedule of a block.

    Args:
        name: the schedule, as in :class:`~holotrain.reversible.ReversibleSequence`.
        held: bytes kept for the backward.
        cost: of a forward and a backward, in any unit.
    """

    name: str
    held: int
    cost: float


@dataclass(frozen=True)
class Stage:
    """Consecutive identical blocks.

    Args:
        depth: number of blocks.
        options: the schedules that each may have.
    """

    depth: int
    options: Sequence[Option]


@dataclass(frozen=True)
class Choice:
    """
    Args:
        blocks: the schedule of each block, first to last.
        bound: bytes that the simulated step needs at most.
        cost: of all blocks.
        most_expensive: the cost if every block recomputes as much as it can.
    """

    blocks: list[str]
    bound: int
    cost: float
    most_expensive: float


class TooSmall(ValueError):
    """Nothing fits the budget.

    Args:
        least: the smallest bound in bytes, which is also an attribute.
    """

    def __init__(self, least: int) -> None:
        super().__init__(f"nothing needs less than {least} bytes")
        self.least = least


def choose(stages: Sequence[Stage], bound: Callable[[list[str]], int], budget: int) -> Choice:
    """Returns the cheapest choice whose simulated bound fits the budget minus a margin; the smallest choice may use the margin.

    Args:
        bound: bytes that a step needs at most, given the schedule of each block.

    Raises:
        TooSmall: not even the smallest choice fits the budget.
    """

    @cache
    def of_names(*names: str) -> int:
        return bound(list(names))

    def simulated(options: list[Option]) -> int:
        return of_names(*_names(options))

    least = best = cheapest(stages, 0)
    if simulated(least) > budget:
        raise TooSmall(simulated(least))
    room = budget * (1 - MARGIN)
    high = 2.0 * sum(stage.depth * max(option.held for option in stage.options) for stage in stages)  # room for everything
    chosen = cheapest(stages, high)
    beyond: list[Option] | None = None
    for _ in range(1 + ROUNDS if simulated(least) < room else 0):
        if simulated(chosen) <= room:
            best = min(best, chosen, key=_cost)
        else:
            beyond, high = chosen, min(high, _held(chosen) - _held(least))
        if beyond is None:
            break
        # The bound is convex in the held bytes, so a line between a choice that fits and one that does not is safe.
        share = (room - simulated(best)) / (simulated(beyond) - simulated(best))
        low = _held(best) - _held(least)
        chosen = cheapest(stages, low + (_held(beyond) - _held(best)) * share)
        if _names(chosen) == _names(best):
            chosen = cheapest(stages, (low + high) / 2)
    return Choice(_names(best), simulated(best), _cost(best), _cost(least))


def cheapest(stages: Sequence[Stage], spare: float) -> list[Option]:
    """Returns the option of each block with the least total cost that hold at most ``spare`` bytes above the minimum.

    Within a stage the options that hold most come last: their memory is free again when the other blocks recompute.
    """
    cell = max(spare, 1) / CELLS
    # costs[c]: least cost of the blocks so far within c cells; picks[b][c]: the option of block b for it.
    costs, picks = [0.0] * (CELLS + 1), []
    for stage in stages:
        least = min(option.held for option in stage.options)
        needed = [-int(-(option.held - least) // cell) for option in stage.options]
        ways = [(number, cells, option.cost) for number, (cells, option) in enumerate(zip(needed, stage.options, strict=True))]
        for _ in range(stage.depth):
            best = (min((costs[room - n] + cost, i) for i, n, cost in ways if n <= room) for room in range(CELLS + 1))
            costs, pick = zip(*best, strict=True)
            picks.append((stage.options, needed, pick))
    room, found = CELLS, []
    for options, needed, pick in reversed(picks):
        found.append(options[pick[room]])
        room -= needed[pick[room]]
    chosen = reversed(found)
    return [option for stage in stages for option in sorted(islice(chosen, stage.depth), key=lambda option: option.held)]


def _names(options: list[Option]) -> list[str]:
    return [option.name for option in options]


def _held(options: list[Option]) -> int:
    return sum(option.held for option in options)


def _cost(options: list[Option]) -> float:
    return sum(option.cost for option in options)


REPEATS = 5
"""Measurements of each option after the first run, in turn with the other options."""

BLOCKS = 2
"""Number of consecutive blocks that are timed, so that recomputation can run ahead from one to the other."""


@dataclass(frozen=True)
class Visit:
    """A sequence of blocks and the arguments of a call."""

    sequence: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def visits_of(step: TrainingStep) -> list[Visit]:
    """The calls of the sequences in a forward of the step, which is run without gradients.

    An optimizer that steps in the backward leaves the model from now on, so that blocks can be run by themselves.
    """
    if isinstance(step.optimizer, InBackward):
        step.optimizer.remove()
    visits: list[Visit] = []

    def record(sequence: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        visits.append(Visit(sequence, args, kwargs))

    with ExitStack() as hooks, torch.no_grad(), step.autocast():
        for sequence in step.sequences:
            hooks.enter_context(sequence.register_forward_pre_hook(record, with_kwargs=True))
        step.loss()
    return visits


def stage_of(
    visit: Visit,
    costs: dict[str, float],
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    allocator: Allocator = CPU,
) -> Stage:
    """Returns the options of a sequence's blocks, based on its first block, without options that are worse in memory and cost.

    Call it inside :func:`~holotrain.planning.fake_tensors`, with the visit's tensors.

    Args:
        costs: cost of each schedule to consider.
    """
    options = [Option(name, _held_by_one_more(visit, name, autocast, allocator), cost) for name, cost in costs.items()]
    worse = [option for option in options if any(o.held <= option.held and o.cost < option.cost for o in options)]
    return Stage(len(visit.sequence.blocks), [option for option in options if option not in worse])


def _held_by_one_more(visit: Visit, name: str, autocast: Callable[[], AbstractContextManager], allocator: Allocator) -> int:
    """Bytes that one more block keeps after the forward."""
    alive = []
    for depth in (1, 2):
        tracker = AllocationTracker(allocator)
        args, kwargs = _leaves(visit)
        tracker.label("given", (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)))
        sequence = visit.sequence.again(depth, name)
        tracker.label("parameters", sequence.parameters())
        with tracker.tracking(), autocast():
            output = sequence(*args, **kwargs)
        alive.append(tracker.alive)
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
    clock = Clock(device)
    marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in names}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for _ in range(1 + REPEATS):
            for name, sequence in sequences.items():
                begun = clock.mark()
                _run(sequence, visit, autocast)
                marks[name].append((begun, clock.mark()))
    return {
        name: statistics.median(clock.waited_seconds(*pair) for pair in pairs[1:]) / BLOCKS for name, pairs in marks.items()
    }


def _run(sequence: nn.Module, visit: Visit, autocast: Callable[[], AbstractContextManager] = nullcontext) -> None:
    args, kwargs = _leaves(visit)
    with autocast():
        result = sequence(*args, **kwargs)
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])


def _leaves(visit: Visit) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns detached arguments; the streams require gradients, as they do inside a model."""
    args, kwargs = tree_map_only(Tensor, lambda x: x.detach().requires_grad_(x.requires_grad), (visit.args, visit.kwargs))
    for arg in args:
        if isinstance(arg, Tensor) and arg.is_floating_point():
            arg.requires_grad_()
    return args, kwargs
