"""What a device takes for storages, and what its operations take for themselves."""

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
"""Operations that a CPU gives operands of one dtype: it copies those of another first (TensorIterator)."""


@dataclass(frozen=True)
class Allocator:
    """
    Args:
        rounded: from a storage's bytes to what is taken for it.
        copies_operands: whether arithmetic on two dtypes makes copies of one.
        scratch: bytes that an operation may hold beside that, at most, given its arguments.
    """

    rounded: Callable[[int], int] = int
    copies_operands: bool = True
    scratch: Callable[[OpOverload, tuple], int] = scratch

    def within(self, function: OpOverload, args: tuple, result: object) -> int:
        """Bytes that an operation takes and gives back before it returns, as far as they are worth counting."""
        if function is torch.ops.aten.logsumexp.default:
            return self.rounded(args[0].nbytes)  # the exponentials, before they are summed
        if function is torch.ops.aten._safe_softmax.default:
            return self.rounded(args[0].numel())  # which entries are masked
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
"""By device: as ``torch.cuda.memory_allocated`` counts, and as the CPU's allocator reports to the profiler."""
