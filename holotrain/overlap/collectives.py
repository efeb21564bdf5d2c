"""The asynchronous collectives of a process group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Work(Protocol):
    """A running collective. Work after ``wait`` sees its result; on CUDA the stream waits, not the host."""

    def wait(self) -> object: ...


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
        return dist.all_reduce(tensor, group=self.group, async_op=True)

    def reduce_scatter(self, share: Tensor, parts: Tensor) -> Work:
        """Writes the sum over ranks of ``parts[rank]`` to ``share``.

        Args:
            share: [rows, features], contiguous.
            parts: [ranks, rows, features], contiguous.
        """
        return dist.reduce_scatter_tensor(share, parts.flatten(0, 1), group=self.group, async_op=True)

    def all_gather(self, parts: Tensor, share: Tensor) -> Work:
        """Writes the share of each rank r to ``parts[r]``.

        Args:
            parts: [ranks, rows, features]; each rank's part is contiguous.
            share: [rows, features], contiguous.
        """
        if parts.is_contiguous():
            return dist.all_gather_into_tensor(parts.flatten(0, 1), share, group=self.group, async_op=True)
        return dist.all_gather(list(parts.unbind(0)), share, group=self.group, async_op=True)

    def agreed(self, value: object) -> object:
        """Returns the value of rank 0 on every rank. Synchronises the ranks."""
        said = [value]
        dist.broadcast_object_list(said, group=self.group, group_src=0)
        return said[0]

    def slowest(self, seconds: Sequence[float], device: torch.device) -> list[float]:
        """Returns the maximum of each time over the ranks. Synchronises the ranks."""
        times = torch.tensor(seconds, dtype=torch.float64, device=device)
        dist.all_reduce(times, dist.ReduceOp.MAX, group=self.group)
        return times.tolist()


def collectives_of(group: dist.ProcessGroup | Collectives) -> Collectives:
    return Collectives(group) if isinstance(group, dist.ProcessGroup) else group


def wait_for(works: Iterable[Work]) -> None:
    for work in works:
        work.wait()
