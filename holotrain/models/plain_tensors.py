"""Tensors in files that anybody may have written: plain numbers, all of which stand in the file.

They are checked before anything looks at their values: a few bytes can claim 10^13 of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import KeyPath, tree_leaves_with_path

DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool),
}
"""Those that torch can convert."""


def named(keys: KeyPath) -> str:
    """The name of a tensor: the keys on the way to it."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in keys)


def require_plain(held: Any, file: Path, meta: bool = False) -> None:
    """
    Args:
        held: what was read from the file: tensors in containers.
        meta: tensors may be meta tensors, whose values are elsewhere.

    Raises:
        ValueError: a tensor in it is sparse, quantised, nested or of an unknown class, or has more elements than are stored.
    """
    for keys, leaf in tree_leaves_with_path(held):
        if isinstance(leaf, Tensor) and (flaw := _flaw(leaf, meta)):
            raise ValueError(f"{file} is damaged, or of another program: the tensor {named(keys)[:200]!r} {flaw}")


def _flaw(tensor: Tensor, meta: bool) -> str | None:
    if type(tensor).__module__.startswith("torchao.") and is_traceable_wrapper_subclass(tensor):  # an optimizer's state
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        return next(filter(None, (_flaw(part, meta) for part in parts)), None)
    if type(tensor) not in (Tensor, nn.Parameter):
        return f"is a {type(tensor).__name__}"
    if tensor.is_nested or tensor.layout is not torch.strided:
        return "is nested" if tensor.is_nested else f"is of layout {tensor.layout}"
    if tensor.dtype not in DTYPES:
        return f"is of dtype {tensor.dtype}"
    if tensor.is_meta and not meta:
        return "has no values"
    claimed, stored = prod(tensor.shape) * tensor.itemsize, tensor.untyped_storage().nbytes()
    return f"claims {claimed} bytes and has {stored}" if claimed > stored else None  # a stride of 0 shows one number many times


def require_same(expected: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """
    Args:
        expected: a model's ``state_dict``.
        weights: what is to be loaded into it.

    Raises:
        ValueError: a name, a shape or the dtype differs; floating-point dtypes may have another width.
    """
    for name in [*expected, *weights]:
        here, there = (_kind_of(tensors, name) for tensors in (expected, weights))
        if here != there:
            raise ValueError(f"{name} is {there}, not {here}")


def _kind_of(tensors: Mapping[str, Any], name: str) -> str:
    if name not in tensors:
        return "missing"
    tensor = tensors[name]
    return f"{tuple(tensor.shape)}" if tensor.is_floating_point() else f"{tuple(tensor.shape)} {tensor.dtype}"
