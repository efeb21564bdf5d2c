"""Parameters of tests: some cases by default, others marked slow or long."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations, cycle, product

import pytest

slow = partial(pytest.param, marks=pytest.mark.slow)
"""One case of a test's parameters that is run with the slow tests."""

long = partial(pytest.param, marks=pytest.mark.long)
"""One case that only ``pytest -m long`` runs."""


def paired(*options: Sequence) -> list[tuple]:
    """Each value of each option, in as few cases as the longest has values."""
    return [tuple(values[number % len(values)] for values in options) for number in range(max(map(len, options)))]


def name_of(value: object) -> str:
    """What pytest shows of a parameter, the same in each of its processes."""
    return getattr(value, "__name__", str(value))


def pairwise(*options: Sequence) -> list[tuple]:
    """Cases in which any two values of two options meet, a few of the full product."""
    places = [[(option, number) for number in range(len(values))] for option, values in enumerate(options)]
    missing = dict.fromkeys(pair for one, other in combinations(places, 2) for pair in product(one, other))
    chosen = []
    while missing:
        case = dict(next(iter(missing)))
        for option, candidates in enumerate(places):
            if option not in case:
                case[option] = max(candidates, key=lambda place: _new_pairs(place, case, missing))[1]
        for pair in combinations(sorted(case.items()), 2):
            missing.pop(pair, None)
        chosen.append(tuple(values[case[option]] for option, values in enumerate(options)))
    return chosen


def _new_pairs(place: tuple[int, int], case: dict[int, int], missing: dict) -> int:
    return sum(tuple(sorted((place, other))) in missing for other in case.items())


def chosen(matrix: Sequence[tuple], default: Callable[[int, tuple], bool]) -> list:
    """The cases for which ``default(number, case)`` holds; of the others every third is marked slow, and the rest long."""
    marked, others = [], cycle((slow, long, long))
    for number, case in enumerate(matrix):
        mark = pytest.param if default(number, case) else next(others)
        marked.append(mark(*case))
    return marked
