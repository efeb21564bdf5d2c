"""Gathers and shards tensors.

Tensor parallel may shard stacked rows, such as queries, keys and values, with ``_StridedShard``. torch's support for gathering
them depends on the version (2.11 has none; 2.15 uses the wrong order if FSDP2 shards the rows too). So stacks are treated as a
separate dimension here, and the dimensions of a mesh are handled one after the other.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor


def whole(part: Tensor) -> Tensor:
    """The full tensor, on every process. All processes must call it. A plain tensor is returned unchanged."""
    if not isinstance(part, DTensor):
        return part
    mesh, own, count = part.device_mesh, part.to_local(), stacks(part)
    if mesh.ndim == 1 and count == 1:
        return part.full_tensor()
    layers = mesh
    if mesh.ndim == 2:
        data, layers = (mesh[name] for name in mesh.mesh_dim_names)
        shape = list(part.shape)
        if (dim := getattr(part.placements[1], "dim", None)) is not None:
            shape[dim] //= layers.size()  # layers are only sharded if this is divisible
        own = _gathered(own, data, _of_data(part.placements), torch.Size(shape))
    if count == 1:
        return _gathered(own, layers, part.placements[-1], part.shape)
    shape = torch.Size((count, len(part) // count, *part.shape[1:]))
    return _gathered(own.unflatten(0, (count, -1)), layers, Shard(1), shape).flatten(0, 1)


def _gathered(own: Tensor, mesh: DeviceMesh, placement: Placement, shape: torch.Size) -> Tensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(own, mesh, [placement], run_check=False, shape=shape, stride=stride).full_tensor()


def part_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This process's part of a full tensor, sharded like another tensor of its shape. Needs no communication."""
    return shared_out(tensor.to(like.device), like.device_mesh, like.placements) if isinstance(like, DTensor) else tensor


def shared_out(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Shards a tensor that all processes have in full."""
    own = _own(tensor, mesh, placements)
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def numbers(part: DTensor, dim: int) -> Tensor:
    """The indices of the rows (``dim`` 0) or columns (1, ...) of the full tensor that this process has, in its local order."""
    cut = [_along(placement, dim) for placement in part.placements]
    return _own(torch.arange(part.shape[dim], device=part.device), part.device_mesh, cut)


def stacks(part: DTensor) -> int:
    """The number of stacks in which tensor parallel shards the rows."""
    return _stacks(part.placements[-1])


def _stacks(placement: Placement) -> int:
    return getattr(placement, "split_factor", 1)


def _own(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    if mesh.ndim == 1:
        return _cut(tensor, mesh, placements[0])
    data, layers = (mesh[name] for name in mesh.mesh_dim_names)
    return _cut(_cut(tensor, layers, placements[1]), data, _of_data(placements))


def _cut(tensor: Tensor, mesh: DeviceMesh, placement: Placement) -> Tensor:
    if (count := _stacks(placement)) > 1:
        return _cut(tensor.unflatten(0, (count, -1)), mesh, Shard(1)).flatten(0, 1)
    return distribute_tensor(tensor, mesh, [placement], src_data_rank=None).to_local()


def _of_data(placements: Sequence[Placement]) -> Placement:
    """FSDP2's placement of the tensor parallel part."""
    dim = getattr(placements[0], "dim", None)
    return Replicate() if dim is None else Shard(dim)


def _along(placement: Placement, dim: int) -> Placement:
    """The placement of the indices along one dimension, for a tensor with this placement."""
    if getattr(placement, "dim", None) != dim:
        return Replicate()
    return placement if dim == 0 else Shard(0)
