"""The shard of a tensor that this process has, without importing what shards it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_sharded(tensor: Tensor) -> TypeIs[DTensor]:
    """Whether it is a DTensor."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """This process's shard of a DTensor, without its history; any other tensor itself."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor  # ty: ignore[missing-attribute]
