"""Which share of the data a process reads."""

import torch.distributed as dist

_set: tuple[int, int] | None = None


def set_share(rank: int | None = None, size: int | None = None) -> None:
    """Says that this process reads share number ``rank`` of ``size``, where it is not its rank of all: under tensor
    parallelism several processes read the same. Without arguments: as torch.distributed says, again."""
    global _set
    _set = None if rank is None or size is None else (rank, size)


def share() -> tuple[int, int]:
    """The number of this process's share, and of how many: (0, 1) where it trains alone."""
    if _set is not None:
        return _set
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
