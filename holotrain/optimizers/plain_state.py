"""The state of an optimizer as plain tensors, where it holds tensors of a library's own class.

torchao keeps averages as tensors of 8 or 4 bits: codes, the scale of each block of entries, and the values that codes stand for.
A checkpoint is data, so it holds these parts. The state is rebuilt from them when it is loaded, with no bit changed. Parts of a
sharded state are sharded as their parameter is, so a checkpoint is the same for any number of processes.
"""

from __future__ import annotations

import sys
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

CLASS, CONTEXT = "tensor_class", "context"
"""Keys of a rebuilt tensor's class and further arguments, beside its parts."""

UNDIVIDED = ("qmap",)
"""Parts that are the same for every share of a tensor. The others belong to stretches of its entries."""


def with_plain_state(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer, whose ``state_dict`` holds plain tensors from now on, and whose ``load_state_dict`` takes them.

    Raises:
        ValueError: in ``load_state_dict``: a tensor's class is unknown, or its parts do not fit.
    """
    optimizer.register_state_dict_post_hook(_plain_state)
    optimizer.register_load_state_dict_pre_hook(_rebuilt_state)
    return optimizer


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
    state = {number: {name: _plain(x) for name, x in kept.items()} for number, kept in state_dict["state"].items()}
    return state_dict | {"state": state}


def _rebuilt_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    of = dict(zip(numbers, parameters, strict=False))  # load_state_dict reports different lengths
    state = {
        number: {name: _rebuilt(x, of[number]) if number in of else x for name, x in kept.items()}
        for number, kept in state_dict["state"].items()
    }
    return state_dict | {"state": state}


def _is_sharded(tensor: Any) -> bool:
    return hasattr(tensor, "device_mesh")


def _plain(value: Any) -> Any:
    local = value.to_local() if _is_sharded(value) else value
    if not isinstance(local, Tensor) or not is_traceable_wrapper_subclass(local):
        return value
    names, context = local.__tensor_flatten__()
    said = ["dtype" if isinstance(x, torch.dtype) else "shape" if isinstance(x, tuple) else x for x in context]
    parts = {name: getattr(local, name) for name in names}
    for name in parts.keys() - {*UNDIVIDED}:
        part = _by_rows(parts[name], local.shape)
        if _is_sharded(value):
            rows = value.shape[0] if len(part) == len(local) else len(part) * value.device_mesh.size()
            part = _of_shares(part, value, (rows, *part.shape[1:]))
        parts[name] = part
    return {CLASS: type(local).__name__, CONTEXT: said, **parts}


def _by_rows(part: Tensor, shape: torch.Size) -> Tensor:
    """A part with a row for each row of the whole, if its stretches do not cross rows: such parts are sharded alike."""
    entries = prod(shape) // part.numel()
    return part if part.shape == shape or prod(shape[1:]) % entries else part.view(shape[0], -1)


def _rebuilt(value: Any, parameter: Tensor) -> Any:
    if _is_sharded(parameter) and isinstance(value, Tensor) and value.shape == parameter.shape:
        return _distributed(value, parameter)
    if not isinstance(value, dict) or CLASS not in value:
        return value
    try:
        return _rebuilt_in_shares(value, parameter) if _is_sharded(parameter) else _assembled(value, parameter)
    except (ArithmeticError, AssertionError, AttributeError, KeyError, RuntimeError, TypeError) as error:
        raise ValueError(f"the optimizer's state is no {value[CLASS]} of shape {tuple(parameter.shape)}: {error}") from error


def _rebuilt_in_shares(value: dict[str, Any], parameter: Tensor) -> Tensor:
    """A DTensor of the class, or, where shares are not whole blocks, one of plain numbers with the same values."""
    divided = {name: part for name, part in value.items() if name not in (CLASS, CONTEXT, *UNDIVIDED)}
    if all(whole_blocks(parameter, max(1, parameter.numel() // part.numel())) for part in divided.values()):
        shares = {name: _distributed(part, parameter).to_local() for name, part in divided.items()}
        return _of_shares(_assembled(value | shares, parameter.to_local()), parameter, parameter.shape)
    like = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    whole = {name: part.full_tensor() if _is_sharded(part) else part for name, part in divided.items()}
    return _distributed(like.copy_(_assembled(value | whole, like)), parameter)


def _assembled(value: dict[str, Any], like: Tensor) -> Tensor:
    """The tensor of a dictionary, on the device of ``like`` and with its shape and dtype."""
    torchao = sys.modules.get("torchao.utils")  # the file names no module to import
    classes = {each.__name__: each for each in torchao.TorchAOBaseTensor.__subclasses__()} if torchao else {}
    if value[CLASS] not in classes:
        raise ValueError(f"the optimizer's state is of {value[CLASS]}, a class that this optimizer does not use")
    parts = {name: part.to(like.device) for name, part in value.items() if name not in (CLASS, CONTEXT)}
    parts = {name: part if part.shape == like.shape else part.flatten() for name, part in parts.items()}
    context = [{"dtype": like.dtype, "shape": like.shape}.get(x, x) for x in value[CONTEXT]]
    return classes[value[CLASS]].__tensor_unflatten__(parts, context, like.shape, like.stride())


def _distributed(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, sharded like another, if it is not sharded yet."""
    if _is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor  # imported here, because one process does without

    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def _of_shares(local: Tensor, like: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """This process's share of a tensor as a DTensor of this shape, sharded like another."""
    stride = torch.empty(shape, device="meta").stride()
    return type(like).from_local(local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)
