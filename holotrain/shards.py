"""The shard of a tensor that this process has, without importing what shards it."""

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """This process's shard of a DTensor, without its history; any other tensor itself."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor
