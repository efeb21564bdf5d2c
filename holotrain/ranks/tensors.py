"""Tensors that are shared out among processes, put together and taken apart.

On two dimensions (FSDP2 over tensor parallel) torch (2.15) puts together in the wrong order what both cut by rows, if tensor
parallel deals the rows out in stacks, as those of queries, keys and values. One dimension after the other, it does not.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


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
        part.to_local(), data, [_of_data(part)], run_check=False, shape=torch.Size(shape), stride=stride
    ).full_tensor()
    return DTensor.from_local(
        rows, layers, part.placements[1:], run_check=False, shape=part.shape, stride=part.stride()
    ).full_tensor()


def part_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This process's part of a whole tensor, shared out as another of its shape is; no process needs the others for it."""
    if not isinstance(like, DTensor):
        return tensor
    mesh, tensor = like.device_mesh, tensor.to(like.device)
    if mesh.ndim == 1:
        return distribute_tensor(tensor, mesh, like.placements, src_data_rank=None)
    data, layers = (mesh[name] for name in mesh.mesh_dim_names)
    rows = distribute_tensor(tensor, layers, like.placements[1:], src_data_rank=None).to_local()
    own = distribute_tensor(rows, data, [_of_data(like)], src_data_rank=None).to_local()
    return DTensor.from_local(own, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def _of_data(part: DTensor) -> Shard:
    """How FSDP2 cut the rows of what tensor parallel had left."""
    return Shard(part.placements[0].dim)
