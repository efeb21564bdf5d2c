"""Tensors that are shared out among processes, put together and taken apart.

On two dimensions (FSDP2 over tensor parallel) torch (2.15) puts together in the wrong order what both cut by rows, if tensor
parallel deals the rows out in stacks, as those of queries, keys and values. One dimension after the other, it does not.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor


def whole(part: Tensor) -> Tensor:
    """The tensor that this is a part of, on every process; all must take part. What is no part is returned as it is."""
    if not isinstance(part, DTensor):
        return part
    if part.device_mesh.ndim == 1:
        return part.full_tensor()
    data, layers = (part.device_mesh[name] for name in part.device_mesh.mesh_dim_names)
    shape = list(part.shape)
    if (dim := getattr(part.placements[1], "dim", None)) is not None:
        shape[dim] //= layers.size()  # layers are shared out only where that divides
    stride = torch.empty(shape, device="meta").stride()
    rows = DTensor.from_local(
        part.to_local(), data, [_of_data(part.placements)], run_check=False, shape=torch.Size(shape), stride=stride
    ).full_tensor()
    return DTensor.from_local(
        rows, layers, part.placements[1:], run_check=False, shape=part.shape, stride=part.stride()
    ).full_tensor()


def part_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This process's part of a whole tensor, shared out as another of its shape is; no process needs the others for it."""
    if not isinstance(like, DTensor):
        return tensor
    mesh = like.device_mesh
    own = _own(tensor.to(like.device), mesh, like.placements)
    return DTensor.from_local(own, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def numbers(part: DTensor, dim: int) -> Tensor:
    """Which of the whole tensor's rows (``dim`` 0) or columns (1, ...) this process has, in the order in which it has them."""
    cut = [_along(placement, dim) for placement in part.placements]
    return _own(torch.arange(part.shape[dim], device=part.device), part.device_mesh, cut)


def stacks(part: DTensor) -> int:
    """In how many stacks tensor parallel deals the rows out."""
    return getattr(part.placements[-1], "split_factor", 1)


def _own(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    if mesh.ndim == 1:
        return distribute_tensor(tensor, mesh, placements, src_data_rank=None).to_local()
    data, layers = (mesh[name] for name in mesh.mesh_dim_names)
    rows = distribute_tensor(tensor, layers, placements[1:], src_data_rank=None).to_local()
    return distribute_tensor(rows, data, [_of_data(placements)], src_data_rank=None).to_local()


def _of_data(placements: Sequence[Placement]) -> Placement:
    """How FSDP2 cut the rows of what tensor parallel had left."""
    dim = getattr(placements[0], "dim", None)
    return Replicate() if dim is None else Shard(dim)


def _along(placement: Placement, dim: int) -> Placement:
    """How a list of the numbers along one dimension is cut where a tensor is cut so."""
    if getattr(placement, "dim", None) != dim:
        return Replicate()
    return placement if dim == 0 else Shard(0)
