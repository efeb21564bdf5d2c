"""The groups of a product, rows or columns, by which job they are chosen, and the collectives that carry them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL = "all_reduce", "reduce_scatter", "all_gather", "all_to_all"
COLLECTIVES = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL)


class Work(Protocol):
    """A running collective. Work after ``wait`` sees its result; on CUDA the stream waits, not the host."""

    def wait(self) -> object: ...


@dataclass
class Holding:
    """A collective that keeps tensors alive until it has been waited for, and what is to be done then."""

    work: Work
    held: object
    then: Callable[[], object] | None = None

    def wait(self) -> None:
        self.work.wait()
        if self.then is not None:
            self.then()
        self.held = self.then = None


class Collectives:
    """The collectives of one process group, launched asynchronously (``async_op=True``) in the order of the current stream.

    The caller must keep the tensors alive until it has waited. All ranks must launch in the same order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.ranks = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.name = dist.get_backend(group)

    def all_reduce(self, tensor: Tensor) -> Work:
        """Sums a contiguous tensor in place."""
        return cast(Work, dist.all_reduce(tensor, group=self.group, async_op=True))

    def reduce_scatter(self, share: Tensor, parts: Tensor) -> Work:
        """Writes the sum over ranks of ``parts[rank]`` [rows, features] to ``share``; both are contiguous."""
        return cast(Work, dist.reduce_scatter_tensor(share, parts.flatten(0, 1), group=self.group, async_op=True))

    def all_gather(self, parts: Tensor, share: Tensor) -> Work:
        """Writes the share [rows, features] of each rank r to ``parts[r]``; both are contiguous."""
        if parts.is_contiguous():
            return cast(Work, dist.all_gather_into_tensor(parts.flatten(0, 1), share, group=self.group, async_op=True))
        return cast(Work, dist.all_gather(list(parts.unbind(0)), share, group=self.group, async_op=True))

    def all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Work:
        """Sends ``sent[rank]`` [rows, features] to each rank, and writes what it sends here to ``received[rank]``.

        There may be any numbers of rows. What is not contiguous is copied.
        """
        leaving: Sequence[Tensor] | Tensor
        if self.name == "nccl":
            arrived = [part if part.is_contiguous() else part.new_empty(part.shape) for part in received]
            leaving = [part.contiguous() for part in sent]
            work = dist.all_to_all(arrived, leaving, group=self.group, async_op=True)
        else:  # gloo does not exchange lists of tensors of several shapes, and none at all before torch 2.12
            leaving = torch.cat([part.flatten() for part in sent])
            whole = leaving.new_empty(sum(part.numel() for part in received))
            counts = [[part.numel() for part in parts] for parts in (received, sent)]
            work = dist.all_to_all_single(whole, leaving, *counts, group=self.group, async_op=True)
            arrived = [part.view(to.shape) for part, to in zip(whole.split(counts[0]), received, strict=True)]

        def put() -> None:
            for to, part in zip(received, arrived, strict=True):
                if to is not part:
                    to.copy_(part)

        return Holding(cast(Work, work), leaving, put)

    def agreed(self, value: Any) -> Any:
        """Returns the value of rank 0 on every rank. Synchronises the ranks."""
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]

    def largest(self, values: Sequence[float], device: torch.device) -> list[float]:
        """Returns the maximum of each value over the ranks. Synchronises the ranks."""
        found = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return found.tolist()


def collectives_of(group: dist.ProcessGroup | Collectives) -> Collectives:
    return Collectives(group) if isinstance(group, dist.ProcessGroup) else group


def wait_for(works: Iterable[Work]) -> None:
    for work in works:
        work.wait()


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
