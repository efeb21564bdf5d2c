"""Which shard of the data a process reads."""

import torch.distributed as dist

_set: tuple[int, int] | None = None


def set_data_shard(rank: int | None = None, size: int | None = None) -> None:
    """Sets the data shard of this process to number ``rank`` of ``size``. Needed where several processes share a model
    and read the same shard. Without arguments: use the rank and size of torch.distributed again."""
    global _set
    _set = None if rank is None or size is None else (rank, size)


def data_shard() -> tuple[int, int]:
    """Index of this process's data shard and number of shards; (0, 1) for a single process."""
    if _set is not None:
        return _set
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
