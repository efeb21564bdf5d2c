"""Rows or columns split into groups, and the description of a product and its collective by which groups are chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

from holotrain.overlap.collectives import Collectives

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL = "all_reduce", "reduce_scatter", "all_gather", "all_to_all"
COLLECTIVES = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL)


@dataclass(frozen=True)
class Job:
    """A product ``[rows, inputs] x [inputs, outputs]`` whose rows are communicated in groups.

    Args:
        rows: to split into groups. With reduce_scatter and all_gather the rows of one rank's share of the sequence: the
            product has ``ranks`` times as many.
        inputs, outputs: the input and output features on this rank.
        collective: ``all_reduce``, ``reduce_scatter`` or ``all_to_all`` of each group of the result, or ``all_gather`` of each
            group of the rows before they are multiplied.
        ranks: of the process group.
        dtype: of the product and of the messages.
        device: of the product.
        covered: a product of the same size (the weight gradient) follows and overlaps the last messages.
        before: the ``all_to_all`` is of the rows before they are multiplied.
    """

    rows: int
    inputs: int
    outputs: int
    collective: str
    ranks: int
    dtype: torch.dtype
    device: torch.device
    covered: bool = False
    before: bool = False

    @property
    def arrives(self) -> bool:
        """Whether the rows are communicated before they are multiplied."""
        return self.before or self.collective == ALL_GATHER

    @property
    def of_a_share(self) -> bool:
        """Whether the rows are those of one rank's share of the sequence."""
        return self.collective in (REDUCE_SCATTER, ALL_GATHER)

    @property
    def summed(self) -> bool:
        return self.collective in (ALL_REDUCE, REDUCE_SCATTER)

    @property
    def turned(self) -> Job:
        """The job of the transposed product, whose rows are the columns of this one."""
        return replace(self, rows=self.outputs, outputs=self.rows)

    def product_rows(self, rows: int) -> int:
        """Rows of the product for ``rows`` of the job."""
        return rows * self.ranks if self.of_a_share else rows

    def message(self, rows: int) -> int:
        """Bytes of the whole tensor (for all ranks) that is reduced, gathered or exchanged for ``rows`` of the job."""
        features = self.inputs if self.arrives else self.outputs
        return self.product_rows(rows) * features * self.dtype.itemsize


@dataclass(frozen=True)
class Columns:
    """Groups of output features in place of rows: for few rows, where each group of rows would read the whole weight again.

    Only sums over ranks can be cut so. Rows that are gathered or exchanged are cut into as many groups of rows.

    Args:
        sizes: features of each group, or a number of groups of equal size.
    """

    sizes: int | Sequence[int]

    def __len__(self) -> int:
        return self.sizes if isinstance(self.sizes, int) else len(self.sizes)

    def of(self, features: int) -> list[int]:
        return equal_sizes(features, self.sizes) if isinstance(self.sizes, int) else list(self.sizes)


Sizes = Sequence[int] | Columns
Grouping = int | Columns | Callable[[Job, Collectives], Sizes]
"""A number of groups of equal size, of rows or of columns, or a callable that chooses the sizes; the same on every rank."""


def require_grouping(groups: Grouping) -> None:
    """
    Raises:
        TypeError: neither a number, nor columns, nor a callable.
        ValueError: less than one group.
    """
    if callable(groups):
        return
    number = len(groups) if isinstance(groups, Columns) else groups
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"groups must be an integer, Columns, a Tuner or a Predictor, not {number!r}")
    if number < 1:
        raise ValueError(f"groups must be 1 or more, not {number}")


def group_sizes(groups: Grouping, job: Job, collectives: Collectives) -> tuple[list[int], bool]:
    """The size of each group, first to last, and whether they are columns instead of rows.

    No group is empty: if there are fewer rows than groups, each row is a group.

    Raises:
        ValueError: chosen sizes are not positive or do not add up.
    """
    if job.rows == 0:
        return [], False
    chosen = groups if isinstance(groups, int | Columns) else groups(job, collectives)
    columns = isinstance(chosen, Columns) and job.summed
    total, kind = (job.outputs, "columns") if columns else (job.rows, "rows")
    if isinstance(chosen, Columns):
        chosen = chosen.sizes if columns else len(chosen)
    sizes = equal_sizes(total, chosen) if isinstance(chosen, int) else list(chosen)
    if sum(sizes) != total or min(sizes, default=0) < 1:
        raise ValueError(f"groups of {sizes} {kind} were chosen for {total} {kind}; they must be positive and add up to that")
    return sizes, columns


def equal_sizes(rows: int, groups: int) -> list[int]:
    """Sizes that differ by at most one row, the larger ones first."""
    groups = min(groups, rows)
    return [rows // groups + (number < rows % groups) for number in range(groups)]


def spans(sizes: Sequence[int]) -> list[slice]:
    """The rows of each group."""
    return [slice(start, end) for start, end in pairwise(accumulate(sizes, initial=0))]


def in_proportion(sizes: Sequence[int], rows: int) -> list[int]:
    """Scales group sizes to another number of ``rows``; a group can become empty."""
    ends = [round(end * rows / sum(sizes)) for end in accumulate(sizes)]
    return [end - start for start, end in pairwise([0, *ends])]
