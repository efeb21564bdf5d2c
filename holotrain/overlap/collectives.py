"""The asynchronous collectives of a process group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor


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
