"""The state of an optimizer as plain tensors, where it holds tensors of a library's own class.

torchao keeps averages as tensors of 8 or 4 bits: codes, a scale for each block of entries, and the values that codes stand for.
A checkpoint is data, so it holds these parts. The state is rebuilt from them when it is loaded, with no bit changed. Of a
parameter that FSDP2 shards, the optimizer holds the state of its share. In a checkpoint parts are sharded as the parameter is,
so that it is the same for any number of processes.
"""

from __future__ import annotations

import sys
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from holotrain.shards import is_sharded, local

CLASS, CONTEXT, FLOATS = ABOUT = "tensor_class", "context", "floats"
"""Keys of a tensor's class, of further arguments and of the dtypes of parts of 8-bit floats, beside its parts. Those parts are
kept as bytes, which gloo can gather."""

EIGHT_BITS = {str(dtype): dtype for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)}

UNDIVIDED = ("qmap",)
"""Parts that are the same for every share of a tensor. The others belong to blocks of its entries."""


def with_plain_state(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer, whose ``state_dict`` holds plain tensors from now on, and whose ``load_state_dict`` takes them.

    Raises:
        ValueError: in ``load_state_dict``: a tensor's class is unknown, or its parts do not fit.
    """
    optimizer.register_state_dict_post_hook(_plain_state)
    optimizer.register_load_state_dict_pre_hook(_rebuilt_state)
    return optimizer


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold the memory of a tensor: its parts, or itself."""
    return (
        [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        if is_traceable_wrapper_subclass(tensor)
        else [tensor]
    )


def whole_blocks(parameter: Tensor, block: int, least: int = 1) -> bool:
    """Whether each process's share of a parameter consists of whole blocks of entries, so that parts can be sharded like it.

    Args:
        parameter: a DTensor.
        block: entries of a block.
        least: entries that each share needs.
    """
    mesh, placements = parameter.device_mesh, parameter.placements
    if mesh.ndim > 1 or not placements[0].is_shard(0):
        return False
    rows, row = parameter.shape[0], prod(parameter.shape[1:])
    most = -(-rows // mesh.size())
    shares = [min(most, max(rows - most * rank, 0)) * row for rank in range(mesh.size())]
    even = len({*shares}) == 1
    return (even or row % block == 0) and all(share >= least and share % block == 0 for share in shares)


def _plain_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return _with_each(_plain, optimizer, state_dict)


def _rebuilt_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return _with_each(_rebuilt, optimizer, state_dict)


def _with_each(change: Any, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state whose values are ``change(value, parameter)``."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    of = dict(zip(numbers, parameters, strict=False))  # load_state_dict reports other lengths
    state = {
        number: {name: change(value, of[number]) for name, value in kept.items()} if number in of else kept
        for number, kept in state_dict["state"].items()
    }
    return state_dict | {"state": state}


def _plain(value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor) or value.shape != local(parameter).shape:
        return value
    if not is_traceable_wrapper_subclass(value):
        return _as_sharded(value, parameter)
    names, context = value.__tensor_flatten__()
    said = ["dtype" if isinstance(x, torch.dtype) else "shape" if isinstance(x, tuple) else x for x in context]
    parts = {name: getattr(value, name) for name in names}
    floats = {name: str(part.dtype) for name, part in parts.items() if part.is_floating_point() and part.itemsize == 1}
    parts |= {name: parts[name].view(torch.uint8) for name in floats}
    for name in parts.keys() - {*UNDIVIDED}:
        parts[name] = _as_sharded(_by_rows(parts[name], value.shape), parameter)
    return {CLASS: type(value).__name__, CONTEXT: said, FLOATS: floats, **parts}


def _by_rows(part: Tensor, shape: torch.Size) -> Tensor:
    """A part with a row for each row of the whole, if its blocks do not cross rows: such parts are sharded alike."""
    entries = prod(shape) // part.numel()
    return part if part.shape == shape or prod(shape[1:]) % entries else part.view(shape[0], -1)


def _as_sharded(share: Tensor, parameter: Tensor) -> Tensor:
    """A DTensor of what belongs to the shares of a parameter: to each row, or to equally many entries of each process."""
    if not is_sharded(parameter):
        return share
    by_rows = len(share) == len(local(parameter))
    shape = (len(parameter) if by_rows else len(share) * parameter.device_mesh.size(), *share.shape[1:])
    stride = torch.empty(shape, device="meta").stride()
    mesh, placements = parameter.device_mesh, parameter.placements
    return type(parameter.data).from_local(share, mesh, placements, run_check=False, shape=shape, stride=stride)


def _rebuilt(value: Any, parameter: Tensor) -> Any:
    if isinstance(value, Tensor) and is_sharded(parameter) and value.shape == parameter.shape:
        return _share_of(value, parameter)
    if not isinstance(value, dict) or CLASS not in value:
        return value
    try:
        return _in_shares(value, parameter) if is_sharded(parameter) else _assembled(value, parameter)
    except (ArithmeticError, AssertionError, AttributeError, KeyError, RuntimeError, TypeError) as error:
        raise ValueError(f"the optimizer's state is no {value[CLASS]} of shape {tuple(parameter.shape)}: {error}") from error


def _in_shares(value: dict[str, Any], parameter: Tensor) -> Tensor:
    """This process's share, of the class; where shares are not whole blocks, of plain numbers with the same values."""
    divided = {name: part for name, part in value.items() if name not in (*ABOUT, *UNDIVIDED)}
    if all(whole_blocks(parameter, max(1, parameter.numel() // part.numel())) for part in divided.values()):
        return _assembled(value | {name: _share_of(part, parameter) for name, part in divided.items()}, local(parameter))
    like = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    whole = {name: part.full_tensor() if is_sharded(part) else part for name, part in divided.items()}
    return _share_of(like.copy_(_assembled(value | whole, like)), parameter)


def _assembled(value: dict[str, Any], like: Tensor) -> Tensor:
    """The tensor of a dictionary, on the device of ``like`` and with its shape and dtype."""
    torchao = sys.modules.get("torchao.utils")  # the file names no module to import
    classes = {each.__name__: each for each in torchao.TorchAOBaseTensor.__subclasses__()} if torchao else {}
    if value[CLASS] not in classes:
        raise ValueError(f"the optimizer's state is of {value[CLASS]}, a class that this optimizer does not use")
    parts = {name: part.to(like.device) for name, part in value.items() if name not in ABOUT}
    parts |= {name: parts[name].view(EIGHT_BITS[dtype]) for name, dtype in value[FLOATS].items()}
    parts = {name: part if part.shape == like.shape else part.flatten() for name, part in parts.items()}
    context = [{"dtype": like.dtype, "shape": like.shape}.get(x, x) for x in value[CONTEXT]]
    return classes[value[CLASS]].__tensor_unflatten__(parts, context, like.shape, like.stride())


def _share_of(tensor: Tensor, parameter: Tensor) -> Tensor:
    """This process's share of a whole or sharded tensor."""
    if not is_sharded(tensor):
        from torch.distributed.tensor import distribute_tensor  # imported here, because one process does without

        tensor = distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return tensor.to_local()
