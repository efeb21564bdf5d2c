"""Parameters of tests: some cases by default, others marked slow or long."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import pytest

slow = partial(pytest.param, marks=pytest.mark.slow)
"""One case of a test's parameters that is run with the slow tests."""

long = partial(pytest.param, marks=pytest.mark.long)
"""One case that only ``pytest -m long`` runs."""


def thinned(*options: Sequence, keep: Sequence[tuple], allowed: Callable[..., bool] = lambda *case: True) -> list:
    """The full product as pytest's parameters; all but ``keep`` are marked slow."""
    matrix = [case for case in product(*options) if allowed(*case)]
    assert all(case in matrix for case in keep)
    return [(pytest.param if case in keep else slow)(*case) for case in matrix]


def paired(*options: Sequence) -> list[tuple]:
    """Each value of each option, in as few cases as the longest has values."""
    return [tuple(values[number % len(values)] for values in options) for number in range(max(map(len, options)))]
