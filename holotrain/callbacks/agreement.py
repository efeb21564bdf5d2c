"""Agreement: all processes of a training learn of what one of them noticed, at the same batch."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


class Agreement:
    """The largest of the numbers that the processes bring, a batch late, so that none waits for the others.

    Every process must call the same methods in the same order. A group of its own, on the CPU: no GPU is waited for. Alone, a
    process agrees with itself at once.

    Args:
        timeout: for which they wait for each other; None: torch's.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo", timeout=timeout) if together else None
        self._pending: tuple[dist.Work, Tensor] | None = None

    def late(self, number: int) -> int:
        """The largest of what was brought at the call before this one; 0 at the first."""
        if self._group is None:
            return number
        agreed = self._settled()
        self._begin(number)
        return agreed

    def now(self, number: int) -> int:
        """The largest of what is brought now, and was before."""
        if self._group is None:
            return number
        before = self._settled()
        self._begin(number)
        return max(before, self._settled())

    def end(self) -> None:
        """Waits for what is under way, and forgets the group."""
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
