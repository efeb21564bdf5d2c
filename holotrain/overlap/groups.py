"""Rows split into groups, and the description of a product and its collective by which groups are chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from holotrain.overlap.collectives import Collectives

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = "all_reduce", "reduce_scatter", "all_gather"
COLLECTIVES = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER)


@dataclass(frozen=True)
class Job:
    """A product ``[rows, inputs] x [inputs, outputs]`` whose rows are communicated in groups.

    Args:
        rows: to split into groups. With reduce_scatter and all_gather the rows of one rank's share of the sequence: the
            product has ``ranks`` times as many.
        inputs, outputs: the input and output features on this rank.
        collective: ``all_reduce`` or ``reduce_scatter`` of each group of the result, or ``all_gather`` of each group of the
            rows before they are multiplied.
        ranks: of the process group.
        dtype: of the product and of the messages.
        device: of the product.
        covered: a product of the same size (the weight gradient) follows and overlaps the last messages.
    """

    rows: int
    inputs: int
    outputs: int
    collective: str
    ranks: int
    dtype: torch.dtype
    device: torch.device
    covered: bool = False

    def product_rows(self, rows: int) -> int:
        """Rows of the product for ``rows`` of the job."""
        return rows if self.collective == ALL_REDUCE else rows * self.ranks

    def message(self, rows: int) -> int:
        """Bytes of the whole tensor (of all ranks) that is reduced or gathered for ``rows`` of the job."""
        features = self.inputs if self.collective == ALL_GATHER else self.outputs
        return self.product_rows(rows) * features * self.dtype.itemsize


Grouping = int | Callable[[Job, Collectives], Sequence[int]]
"""A number of groups of equal size, or a callable that chooses the sizes. It must be the same on every rank."""


def require_grouping(groups: Grouping) -> None:
    """
    Raises:
        TypeError: neither a number nor a callable.
        ValueError: less than one group.
    """
    if callable(groups):
        return
    if not isinstance(groups, int) or isinstance(groups, bool):
        raise TypeError(f"groups must be an integer, a Tuner or a Predictor, not {groups!r}")
    if groups < 1:
        raise ValueError(f"groups must be 1 or more, not {groups}")


def group_sizes(groups: Grouping, job: Job, collectives: Collectives) -> list[int]:
    """Rows of each group, first to last. No group is empty: if there are fewer rows than groups, each row is a group.

    Raises:
        ValueError: less than one group, or chosen sizes that are not positive or do not add up to the rows.
    """
    if job.rows == 0:
        return []
    if not callable(groups):
        return equal_sizes(job.rows, groups)
    sizes = list(groups(job, collectives))
    if sum(sizes) != job.rows or min(sizes) < 1:
        raise ValueError(f"groups of {sizes} rows were chosen for {job.rows} rows; they must be positive and add up to that")
    return sizes


def equal_sizes(rows: int, groups: int) -> list[int]:
    """Sizes that differ by at most one row, the larger ones first."""
    require_grouping(groups)
    groups = min(groups, rows)
    return [rows // groups + (number < rows % groups) for number in range(groups)]


def spans(sizes: Sequence[int]) -> Iterator[slice]:
    """The rows of each group."""
    start = 0
    for size in sizes:
        yield slice(start, start + size)
        start += size
