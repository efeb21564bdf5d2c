"""Long curves made short enough to draw, without losing what sticks out."""

from itertools import pairwise

import numpy as np


def thinned(values: np.ndarray, limit: int) -> np.ndarray:
    """Which points to keep: of each stretch the lowest and the highest, and both ends.

    Args:
        values: (N,) finite.
        limit: about how many to keep (2 more at the most).

    Returns:
        Their indices, ascending.
    """
    if len(values) <= limit:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), max(limit // 2, 1) + 1).astype(int)
    extremes = [low + end(values[low:high]) for low, high in pairwise(edges) for end in (np.argmin, np.argmax)]
    return np.unique([0, *extremes, len(values) - 1])


def smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of the ``window`` points around each; fewer at the ends.

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
