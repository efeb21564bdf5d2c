"""Parameters of tests: some cases by default, others marked slow or long."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest


def slow(*values: object, id: str | None = None) -> Any:
    """One case of a test's parameters that is run with the slow tests."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def long(*values: object, id: str | None = None) -> Any:
    """One case that only ``pytest -m long`` runs."""
    return pytest.param(*values, marks=pytest.mark.long, id=id)


def thinned(*options: Sequence, keep: Sequence[tuple], allowed: Callable[..., bool] = lambda *case: True) -> list:
    """The full product as pytest's parameters; all but ``keep`` are marked slow."""
    matrix = [case for case in product(*options) if allowed(*case)]
    assert all(case in matrix for case in keep)
    return [(pytest.param if case in keep else slow)(*case) for case in matrix]
