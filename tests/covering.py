"""Matrices of options: some cases by default, the full product with the slow tests."""

from collections.abc import Callable, Sequence
from itertools import product

import pytest


def thinned(*options: Sequence, keep: Sequence[tuple], allowed: Callable[..., bool] = lambda *case: True) -> list:
    """The full product as pytest's parameters; all but ``keep`` are marked slow."""
    matrix = [case for case in product(*options) if allowed(*case)]
    assert all(case in matrix for case in keep)
    return [pytest.param(*case, marks=() if case in keep else pytest.mark.slow) for case in matrix]
