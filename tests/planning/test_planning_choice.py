"""The choice of schedules, and the largest size that fits, against trying everything."""

import itertools
import random

import pytest

from holotrain.planning.choice import Option, Stage, choose
from holotrain.planning.memory_plan import largest

NAMES = ("reversible", "reversible+attention", "checkpoint", "autograd")


def stages(seed):
    generator = random.Random(seed)

    def options():
        held = sorted(generator.sample(range(1, 60), 3))
        costs = sorted(generator.sample(range(100, 140), 4), reverse=True)
        return [Option(name, size, cost) for name, size, cost in zip(NAMES, [0, *held], costs, strict=True)]

    return [Stage(generator.randint(1, 3), options()) for _ in range(2)]


def held(stages, blocks):
    names = iter(blocks)
    return sum({o.name: o.held for o in stage.options}[next(names)] for stage in stages for _ in range(stage.depth))


@pytest.mark.parametrize("seed", range(10))
def test_no_choice_that_fits_is_cheaper(seed):
    found = stages(seed)
    weights = 10_000
    budget = weights + 200 + random.Random(seed).randint(0, 200)

    def bound(blocks):
        return weights + held(found, blocks)

    choice = choose(found, bound, budget)
    each = [stage.options for stage in found for _ in range(stage.depth)]
    fitting = [
        sum(option.cost for option in options)
        for options in itertools.product(*each)
        if sum(option.held for option in options) <= (budget * 0.998 - weights) * (1 - len(each) / 2000)
    ]
    assert choice.bound == bound(choice.blocks) <= budget
    # Cells of the knapsack may round away what would fit by a hair.
    assert choice.cost <= min(fitting)


def test_what_is_left_over_is_given_out_again():
    """A peak that is less than the sum, since what the last blocks hold is free when the first are recomputed."""
    stage = Stage(10, [Option("reversible", 0, 4.0), Option("autograd", 100, 3.0)])

    def peak(blocks):
        return 1000 + 500 + max(0, 100 * blocks.count("autograd") - 500)

    assert choose([stage], peak, 1505).blocks.count("autograd") == 5
    assert choose([stage], peak, 1805).blocks.count("autograd") == 8
    assert choose([stage], peak, 2008).blocks.count("autograd") == 10


def convex(seed):
    generator = random.Random(seed)
    lines = [(generator.randint(0, 2000), generator.choice([0, 1, 7, 40, 133])) for _ in range(3)]
    return lambda size: max(start + slope * size for start, slope in lines)


@pytest.mark.parametrize("unit", [1, 8])
@pytest.mark.parametrize("seed", range(10))
def test_it_finds_what_trying_all_sizes_finds(seed, unit):
    peak = convex(seed)
    budget = random.Random(-seed - 1).randint(0, 6000)
    most = 400 * unit
    asked = []

    def counted(size):
        asked.append(size)
        assert 0 < size <= most and size % unit == 0
        return peak(size)

    start = random.Random(seed).randint(1, 50) * unit
    expected = max((size for size in range(unit, most + 1, unit) if peak(size) <= budget), default=0)
    assert largest(counted, budget, start, unit, most) == expected
    assert len(asked) == len(set(asked)) <= 14


def test_a_straight_line_takes_three_simulations():
    asked = []

    def line(size):
        asked.append(size)
        return 100 + 7 * size

    assert largest(line, 7100, 16) == 1000
    assert len(asked) == 3
