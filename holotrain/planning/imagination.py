"""Models and tensors that exist in shape alone: nothing is allocated, nothing is computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode


class Unplannable(ValueError):
    """What happens depends on the values of tensors, or on an operation whose shapes PyTorch cannot foretell."""


class _Imagination(FakeTensorMode):
    @cached_property
    def avoid_device_init(self) -> bool:
        """Asked at every operation, and without a driver half a millisecond in coming."""
        return super().avoid_device_init


@contextmanager
def imagined() -> Iterator[None]:
    """Inside, every new tensor is a fake one, on the device that it says it is on.

    Raises:
        Unplannable: an operation whose result cannot be imagined; it is named.
    """
    try:
        with _Imagination(allow_non_fake_inputs=True):
            yield
    except DataDependentOutputException as error:
        raise Unplannable(f"{error.func} asks for the value of a tensor, which a plan does not have") from error
    except DynamicOutputShapeException as error:
        raise Unplannable(f"the size of what {error.func} returns depends on values, which a plan does not have") from error
    except UnsupportedOperatorException as error:
        raise Unplannable(f"PyTorch cannot foretell what {error.func} returns") from error


def imagine(module: nn.Module, device: torch.device) -> nn.Module:
    """Replaces the parameters and buffers of a module, built on the meta device, by fake ones; what was shared stays shared.

    To be called inside of :func:`imagined`.
    """
    known: dict[int, Tensor] = {}
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    if id(tensor) not in known:
                        known[id(tensor)] = _fake(tensor, device)
                    table[name] = known[id(tensor)]
    return module


def _fake(tensor: Tensor, device: torch.device) -> Tensor:
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


class selecting(TorchDispatchMode):
    """Inside, a boolean mask is imagined to select this share of its entries, so that ``x[mask]`` has a size."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self._share = share

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in _INDEXING:
            tensor, indices, *rest = args
            return function(tensor, [place for index in indices for place in self._places(index)], *rest, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _places(self, index: Tensor | None) -> list[Tensor | None]:
        if index is None or index.dtype is not torch.bool:
            return [index]
        selected = round(self._share * index.numel())
        return [torch.empty(selected, dtype=torch.int64, device=index.device) for _ in range(index.ndim)]


@contextmanager
def fused_dropout() -> Iterator[None]:
    """Inside, attention drops within its kernel, as CUDA's does: nothing of the size of its weights is made."""
    ordinary = functional.scaled_dot_product_attention

    def without(query: Tensor, key: Tensor, value: Tensor, attn_mask=None, dropout_p=0.0, *rest, **options) -> Tensor:
        return ordinary(query, key, value, attn_mask, 0.0, *rest, **options)

    # Replaced, not watched by a mode: a recomputation in the backward runs outside of modes.
    functional.scaled_dot_product_attention = without
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = ordinary


_INDEXING = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten._index_put_impl_.default}
