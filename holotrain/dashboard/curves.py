"""Downsampling and smoothing of long curves."""

from itertools import pairwise

import numpy as np


def thinned(values: np.ndarray, limit: int, at: np.ndarray | None = None) -> np.ndarray:
    """Downsamples a curve: keeps the minimum and the maximum of each interval, and both ends.

    Args:
        values: (N,) finite.
        limit: approximate number of points to keep (at most 2 more).
        at: (N,) ascending: the places of the values. Intervals are equally long, and their last points are kept too, for
            curves of steps (half as many points more). None: intervals have equally many values.

    Returns:
        Indices of the points to keep, ascending.
    """
    if len(values) <= limit:
        return np.arange(len(values))
    parts = max(limit // 2, 1)
    if at is None:
        edges, lasts = np.linspace(0, len(values), parts + 1).astype(int), []
    else:
        inner = np.searchsorted(at, np.linspace(at[0], at[-1], parts + 1)[1:-1])
        edges = np.unique([0, *inner, len(values)])
        lasts = edges[1:] - 1
    extremes = [low + end(values[low:high]) for low, high in pairwise(edges) for end in (np.argmin, np.argmax)]
    return np.unique([0, *extremes, *lasts, len(values) - 1])


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
