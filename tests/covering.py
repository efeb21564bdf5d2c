"""Matrices of options: a covering design by default, the full product with the slow tests."""

from collections.abc import Callable, Sequence
from itertools import combinations, product

import pytest


def pairwise(*options: Sequence, allowed: Callable[..., bool] = lambda *case: True) -> list[tuple]:
    """Few cases in which every pair of values of two options that may occur together does; chosen greedily."""
    matrix = [places for places in product(*map(range, map(len, options))) if allowed(*_values(options, places))]
    pairs = {places: set(combinations(enumerate(places), 2)) for places in matrix}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(matrix, key=lambda places: len(pairs[places] & missing))
        missing -= pairs[best]
        chosen.append(best)
    return [_values(options, places) for places in sorted(chosen)]


def thinned(*options: Sequence, allowed: Callable[..., bool] = lambda *case: True, keep: Sequence | None = None) -> list:
    """The full product as pytest's parameters; all but ``keep``, by default all but ``pairwise``, are marked slow."""
    kept = pairwise(*options, allowed=allowed) if keep is None else keep
    matrix = [case for case in product(*options) if allowed(*case)]
    assert all(case in matrix for case in kept)
    return [pytest.param(*case, marks=() if case in kept else pytest.mark.slow) for case in matrix]


def _values(options: Sequence, places: tuple[int, ...]) -> tuple:
    return tuple(values[place] for values, place in zip(options, places, strict=True))
