"""Parameters of tests: some cases by default, all others with the slow tests."""

from collections.abc import Callable, Sequence
from itertools import product

import pytest


def slow(*values: object, id: str | None = None):
    """One case of a test's parameters that is run with the slow tests."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def long(*values: object, id: str | None = None):
    """One case that takes part only in ``pytest -m long``: complete lists, of which the slow tests have a sample."""
    return pytest.param(*values, marks=pytest.mark.long, id=id)


def thinned(*options: Sequence, keep: Sequence[tuple], allowed: Callable[..., bool] = lambda *case: True) -> list:
    """The full product as pytest's parameters; all but ``keep`` are marked slow."""
    matrix = [case for case in product(*options) if allowed(*case)]
    assert all(case in matrix for case in keep)
    return [pytest.param(*case, marks=() if case in keep else pytest.mark.slow) for case in matrix]
