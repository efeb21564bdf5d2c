"""Parameters of tests: some cases by default, all others with the slow tests."""

from collections.abc import Callable, Sequence
from itertools import product

import pytest


def slow(*values: object, id: str | None = None):
    """One case of a test's parameters that is run with the slow tests."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def thinned(*options: Sequence, keep: Sequence[tuple], allowed: Callable[..., bool] = lambda *case: True) -> list:
    """The full product as pytest's parameters; all but ``keep`` are marked slow."""
    matrix = [case for case in product(*options) if allowed(*case)]
    assert all(case in matrix for case in keep)
    return [case if case in keep else slow(*case) for case in matrix]
