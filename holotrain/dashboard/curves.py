"""Downsampling and smoothing of long curves."""

from itertools import pairwise

import numpy as np


def thinned(values: np.ndarray, limit: int) -> np.ndarray:
    """Downsamples a curve: keeps the minimum and the maximum of each interval, and both ends.

    Args:
        values: (N,) finite.
        limit: approximate number of points to keep (at most 2 more).

    Returns:
        Indices of the points to keep, ascending.
    """
    if len(values) <= limit:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), max(limit // 2, 1) + 1).astype(int)
    extremes = [low + end(values[low:high]) for low, high in pairwise(edges) for end in (np.argmin, np.argmax)]
    return np.unique([0, *extremes, len(values) - 1])


def smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """Moving average over ``window`` points, fewer at the ends.

    Args:
        values: (N,) finite.

    Returns:
        (N,)
    """
    before = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    place = np.arange(len(values))
    low = np.maximum(place - window // 2, 0)
    high = np.minimum(place + window // 2 + 1, len(values))
    return (before[high] - before[low]) / (high - low)
