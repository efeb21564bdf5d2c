"""Fake models and tensors: they have shapes, but nothing is allocated or computed.

Small tensors of integers, such as positions and masks, stay real, because libraries decide by their values. A model of
transformers, for instance, builds a mask of T x T where positions are those of several packed sequences, or have no values.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MOST_VALUES = 2**22
"""Tensors of more integers than these are fake."""


class Unplannable(ValueError):
    """The step depends on the values of tensors, or on an operation whose output shape PyTorch cannot predict."""


class _FakeTensorMode(FakeTensorMode):
    @cached_property
    def avoid_device_init(self) -> bool:
        """Cached, because it is read at every operation and takes half a millisecond without a driver."""
        return super().avoid_device_init

    def __torch_dispatch__(self, func, types, args: Any = (), kwargs: Any = None):
        if _has_values(func, args, kwargs):
            return self._real_if_small(func, types, args, kwargs or {})
        result: Any = super().__torch_dispatch__(func, types, args, kwargs or {})
        weight = args[_NORMS[func]] if func in _NORMS else None
        if weight is not None and weight.device.type == "cpu" and weight.dtype != args[0].dtype:
            # PyTorch (2.14) gives fake means and deviations the dtype of the input; the kernel for CPUs gives that of weights.
            return result[0], *(figure.to(weight.dtype) for figure in result[1:])
        return result

    def _real_if_small(self, func, types, args: Any, kwargs: Any):
        try:
            predicted = super().__torch_dispatch__(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):  # not if there are values
            return func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(predicted) if isinstance(leaf, Tensor)]
        return func(*args, **kwargs) if all(_is_counted(each) and each.numel() <= MOST_VALUES for each in made) else predicted


def _has_values(func, args: Any, kwargs: Any) -> bool:
    """Whether an operation gives values that can be known: it takes real integers alone, or none, and is not random."""
    if args and isinstance(args[0], FakeTensor):  # the common case
        return False
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if torch.Tag.nondeterministic_seeded in func.tags or func in _WITHOUT_VALUES:
        return False
    return all(_is_counted(each) and not isinstance(each, FakeTensor) for each in tensors)


def _is_counted(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and not tensor.is_floating_point() and not tensor.is_complex()


@contextmanager
def fake_tensors() -> Generator[None]:
    """Inside the context every new tensor is fake, on the device that it reports.

    Raises:
        Unplannable: an operation whose result cannot be predicted; the message names it.
    """
    try:
        with _FakeTensorMode(allow_non_fake_inputs=True):
            yield
    except DataDependentOutputException as error:
        raise Unplannable(f"{error.func} needs the value of a tensor, which a plan does not have") from error
    except DynamicOutputShapeException as error:
        raise Unplannable(f"the output size of {error.func} depends on values, which a plan does not have") from error
    except UnsupportedOperatorException as error:
        raise Unplannable(f"PyTorch cannot predict the output of {error.func}") from error


def fake_parameters(module: nn.Module, device: torch.device) -> nn.Module:
    """Replaces the parameters and buffers of a module on the meta device by fake ones. Shared tensors stay shared.

    Call it inside :func:`fake_tensors`.
    """
    known: dict[int, Tensor] = {}
    for part in module.modules():
        tables: list[dict[str, Any]] = [part._parameters, part._buffers]
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None:
                    if id(tensor) not in known:
                        known[id(tensor)] = _fake(tensor, device)
                    table[name] = known[id(tensor)]
    return module


def _fake(tensor: Tensor, device: torch.device) -> Tensor:
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


class assume_mask_share(TorchDispatchMode):
    """Inside the context a boolean mask is assumed to select this share of its entries, so that ``x[mask]`` has a size."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self._share = share

    def __torch_dispatch__(self, func, types, args: tuple[Any, ...] = (), kwargs=None):
        if func in _INDEXING:
            tensor, indices, *rest = args
            return func(tensor, [place for index in indices for place in self._places(index)], *rest, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _places(self, index: Tensor | None) -> list[Tensor | None]:
        if index is None or index.dtype is not torch.bool:
            return [index]
        selected = round(self._share * index.numel())
        return [torch.empty(selected, dtype=torch.int64, device=index.device) for _ in range(index.ndim)]


class assume_ones(TorchDispatchMode):
    """Inside the context a number whose value is not known is 1, such as a norm by which an optimizer divides an update."""

    def __torch_dispatch__(self, func, types, args: tuple[Any, ...] = (), kwargs=None):
        if is_wrapper_subclass(types):
            return NotImplemented
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is torch.ops.aten._local_scalar_dense.default and args[0].is_floating_point():
                return 1.0
            raise


def is_wrapper_subclass(types: Iterable[type]) -> bool:
    """Whether an operation is one of tensors that are made of others, so that it comes again as operations of these."""
    return any(hasattr(each, "__tensor_flatten__") for each in types)


_NORMS = {torch.ops.aten.native_layer_norm.default: 2, torch.ops.aten.native_group_norm.default: 1}
"""Operations with means and deviations, and the place of their weight."""

_WITHOUT_VALUES = {
    getattr(torch.ops.aten, name).default for name in ("empty_like", "empty_strided", "new_empty", "new_empty_strided")
} | {torch.ops.aten.empty.memory_format}
"""Operations whose results have the values that the memory had before."""

_INDEXING = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten._index_put_impl_.default}
