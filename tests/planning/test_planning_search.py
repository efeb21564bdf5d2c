"""The largest size that fits, against trying all of them."""

import random

import pytest

from holotrain.planning import largest


def convex(seed):
    generator = random.Random(seed)
    lines = [(generator.randint(0, 2000), generator.choice([0, 1, 7, 40, 133])) for _ in range(3)]
    return lambda size: max(start + slope * size for start, slope in lines)


@pytest.mark.parametrize("unit", [1, 8])
@pytest.mark.parametrize("seed", range(60))
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
