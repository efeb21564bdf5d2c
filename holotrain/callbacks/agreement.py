"""Agreement: all processes of a training receive a number from any one of them at the same batch."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


class Agreement:
    """The maximum over processes, one batch late, so that no process waits for the others.

    Every process must call the same methods in the same order. Uses its own gloo group on the CPU, so that no GPU is
    synchronized. A single process gets its own number immediately.

    Args:
        timeout: of the collectives; None: torch's default.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo", timeout=timeout) if together else None
        self._pending: tuple[dist.Work, Tensor] | None = None

    def late(self, number: int) -> int:
        """The maximum of the previous call's numbers; 0 at the first call."""
        if self._group is None:
            return number
        agreed = self._settled()
        self._begin(number)
        return agreed

    def now(self, number: int) -> int:
        """The maximum of the numbers of this call and the previous one."""
        if self._group is None:
            return number
        before = self._settled()
        self._begin(number)
        return max(before, self._settled())

    def end(self) -> None:
        """Waits for the pending collective and destroys the group."""
        if self._group is not None:
            self._settled()
            dist.destroy_process_group(self._group)
            self._group = None

    def _begin(self, number: int) -> None:
        brought = torch.tensor([number])
        self._pending = dist.all_reduce(brought, dist.ReduceOp.MAX, self._group, async_op=True), brought

    def _settled(self) -> int:
        if self._pending is None:
            return 0
        (work, brought), self._pending = self._pending, None
        work.wait()
        return int(brought)
