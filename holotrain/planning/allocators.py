"""The memory that a device allocates for storages, and what its operations need in addition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._ops import OpOverload

from holotrain.planning.scratch import scratch

CUDA_BLOCK = 512
"""Bytes that PyTorch's caching allocator rounds up to (kMinBlockSize of c10/cuda/CUDACachingAllocator.cpp)."""

MIXING = {getattr(torch.ops.aten, name).Tensor for name in ("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_")}
"""Operations that need operands of one dtype on a CPU: an operand of another dtype is copied first (TensorIterator)."""


@dataclass(frozen=True)
class Allocator:
    """
    Args:
        rounded: maps the bytes of a storage to the bytes that are allocated for it.
        copies_operands: whether arithmetic on two dtypes copies an operand.
        scratch: upper bound of the bytes that an operation may allocate in addition, given its arguments.
    """

    rounded: Callable[[int], int] = int
    copies_operands: bool = True
    scratch: Callable[[OpOverload, tuple], int] = scratch

    def within(self, function: OpOverload, args: tuple, result: object) -> int:
        """Bytes that an operation allocates and frees before it returns. Small temporaries are left out."""
        if function is torch.ops.aten.logsumexp.default:
            return self.rounded(args[0].nbytes)  # the exponentials before the sum
        if function is torch.ops.aten._safe_softmax.default:
            return self.rounded(args[0].numel())  # the mask
        if self.copies_operands and function in MIXING and isinstance(result, Tensor):
            operands = (arg for arg in args if isinstance(arg, Tensor) and arg.ndim and arg.dtype != result.dtype)
            return sum(self.rounded(operand.numel() * result.element_size()) for operand in operands)
        return 0


ALLOCATORS = {
    "cpu": Allocator(),
    "cuda": Allocator(
        lambda size: -(-size // CUDA_BLOCK) * CUDA_BLOCK, copies_operands=False, scratch=lambda function, args: 0
    ),
}
"""By device type. They count as ``torch.cuda.memory_allocated`` does, and as the CPU allocator reports to the profiler."""
