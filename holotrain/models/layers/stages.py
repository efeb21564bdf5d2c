"""Models with several sequences of blocks: options that count blocks of the whole model, converted to each sequence."""

from collections.abc import Collection, Sequence
from itertools import accumulate


def stored_by_stage(store: int | Collection[int], depths: Sequence[int]) -> list[list[int]]:
    """The blocks of each stage that store their activations, by their indices within the stage.

    Args:
        store: how many of the model's last blocks, or their indices, counted from 0 over all stages.
        depths: blocks of each stage.

    Raises:
        ValueError: ``store`` names a block that does not exist.
    """
    total = sum(depths)
    stored = set(range(total - store, total) if isinstance(store, int) else store)
    if not stored <= set(range(total)) or (isinstance(store, int) and store < 0):
        raise ValueError(f"store must be a number of blocks up to {total} or indices below {total}, not {store!r}")
    starts = [end - depth for end, depth in zip(accumulate(depths), depths, strict=True)]
    return [
        sorted(i - start for i in stored if start <= i < start + depth) for start, depth in zip(starts, depths, strict=True)
    ]
