"""What a plan must know of a device: how its allocator counts storages, and what operations do on CUDA.

A plan for a GPU runs on fake tensors of a CPU, because autograd's engine asks a driver about tensors of a GPU. They differ in

- autocast. On CUDA norms, softmax, sums and powers give fp32 (``AT_FORALL_FP32`` of ATen/autocast_mode.h), on a CPU they keep
  half precision, and a cross entropy copies the logits to fp32;
- dropout, which on CUDA keeps a mask of bytes, and on a CPU one of numbers;
- dropout in attention, which on CUDA is within its kernel, without a tensor of attention weights.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _dispatch_has_kernel_for_dispatch_key, _ExcludeDispatchKeyGuard
from torch._ops import OpOverload
from torch.library import fallthrough_kernel
from torch.nn import functional

aten = torch.ops.aten

HALF = (torch.bfloat16, torch.float16)

CPU_SHARE = 10
"""Operations on a CPU may hold one byte in so many more than the tensors: copies for oneDNN's kernels, blocks of attention."""

CUDA_WORKSPACES = 3 * 32 * 2**20
"""Bytes that cuBLAS holds on a GPU of the Hopper generation: 32 MiB for each thread and stream, which are those of the forward
and of the backward, and the second stream of ``pareprop``. Earlier GPUs have 8 MiB each."""

CUDA_BLOCK = 512
"""Bytes that PyTorch's caching allocator rounds up to (kMinBlockSize of c10/cuda/CUDACachingAllocator.cpp)."""

MIXING = {getattr(aten, name).Tensor for name in ("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_")}
"""Operations that need operands of one dtype on a CPU: an operand of another dtype is copied first (TensorIterator)."""

MEANS = {aten.mean.default, aten.mean.dim}


@dataclass(frozen=True)
class Allocator:
    """
    Args:
        rounded: maps the bytes of a storage to the bytes that are allocated for it.
        scratch: maps the peak of the tensors to the bytes that operations and libraries may hold in addition.
        on_cpu: whether arithmetic on two dtypes copies an operand, and a mean in half precision its input, in fp32.
    """

    rounded: Callable[[int], int] = int
    scratch: Callable[[int], int] = lambda peak: peak // CPU_SHARE
    on_cpu: bool = True

    def within(self, function: OpOverload, args: tuple, result: object) -> int:
        """Bytes that an operation allocates and frees before it returns. Small temporaries are left out."""
        if function is aten.logsumexp.default:
            return self.rounded(args[0].nbytes)  # the exponentials before the sum
        if function is aten._safe_softmax.default:
            return self.rounded(args[0].numel())  # the mask
        if not self.on_cpu:
            return self.rounded(_gradient_of_queries(args[1])) if function is ATTENTION_BACKWARD else 0
        if function in MEANS and args[0].dtype in HALF and isinstance(result, Tensor):
            return self.rounded(4 * args[0].numel()) + self.rounded(4 * result.numel())  # the copy, and the mean in fp32
        if function in MIXING and isinstance(result, Tensor):
            operands = (arg for arg in args if isinstance(arg, Tensor) and arg.ndim and arg.dtype != result.dtype)
            return sum(self.rounded(operand.numel() * result.element_size()) for operand in operands)
        return 0


ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
"""What a fake tensor of a CPU does for flash attention's backward."""


def _gradient_of_queries(query: Tensor) -> int:
    """Bytes of the fp32 gradient of the queries in the backward of CUDA's flash attention, whose rows and width are rounded up,
    and of a sum for each row (mha_bwd of PyTorch's flash_api.cpp). Attention in fp32 has no such copy."""
    if query.dtype not in HALF:
        return 0
    rows = math.prod(query.shape[:-2]) * _up(query.shape[-2], 128)
    return 4 * rows * (_up(query.shape[-1], 32) + 1)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


CPU = Allocator()

ALLOCATORS = {
    "cpu": CPU,
    "cuda": Allocator(lambda size: _up(size, CUDA_BLOCK), lambda peak: CUDA_WORKSPACES, on_cpu=False),
}
"""By device type. They count as ``torch.cuda.memory_allocated`` does, and as the CPU allocator reports to the profiler."""

IN_FP32 = (
    *("acos", "asin", "cosh", "cosine_similarity", "dist", "erfinv", "exp", "expm1", "group_norm", "layer_norm"),
    *("log", "log10", "log1p", "log2", "logsumexp", "native_layer_norm", "pdist", "pow.Scalar", "pow.Tensor_Scalar"),
    *("pow.Tensor_Tensor", "reciprocal", "renorm", "rms_norm", "rsqrt", "sinh", "softplus", "tan", "upsample_bicubic2d"),
    *("upsample_bilinear2d", "upsample_linear1d", "upsample_nearest2d", "upsample_trilinear3d", "_upsample_bicubic2d_aa"),
    "_upsample_bilinear2d_aa",
)
"""Operations whose arguments CUDA's autocast turns into fp32."""

TO_FP32 = ("cumprod", "cumsum", "linalg_vector_norm", "log_softmax.int", "softmax.int", "sum", "sum.dim_IntList")
"""Operations that compute an fp32 result from arguments in half precision, without a copy of these."""

AUTOCAST = DispatchKeySet(DispatchKey.AutocastCPU)


@contextmanager
def cuda_rules() -> Generator[None]:
    """Inside the context operations on a CPU behave as on CUDA, also in a backward."""
    attention = functional.scaled_dot_product_attention

    def without_dropout(query: Tensor, key: Tensor, value: Tensor, attn_mask=None, dropout_p=0.0, *rest, **options) -> Tensor:
        return attention(query, key, value, attn_mask, 0.0, *rest, **options)

    with torch.library._scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch (2.13) warns of what is replaced
        for names, rule in ((IN_FP32, _in_fp32), (TO_FP32, _to_fp32)):
            for name in names:
                if _has_rule(name):
                    library.impl(name, rule(_operator(name)), "AutocastCPU")
        library.impl("cross_entropy_loss", fallthrough_kernel, "AutocastCPU", allow_override=True)
        library.impl("dropout", _dropout, "AutogradCPU")
        # Replaced instead of a dispatch mode: a recomputation in the backward runs outside of modes.
        functional.scaled_dot_product_attention = without_dropout  # ty: ignore[invalid-assignment]
        try:
            yield
        finally:
            functional.scaled_dot_product_attention = attention


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    return torch.native_dropout(x, p, train)[0] if train and p else x


def _has_rule(name: str) -> bool:
    """Whether this version of PyTorch knows the operation, and has a rule for CUDA alone."""
    cuda, cpu = (_dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key) for key in ("AutocastCUDA", "AutocastCPU"))
    return cuda and not cpu


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _in_fp32(operator: Any) -> Callable:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _ExcludeDispatchKeyGuard(AUTOCAST):
            return operator(*(_raised(arg) for arg in args), **{name: _raised(arg) for name, arg in kwargs.items()})

    return run


def _raised(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF else value


def _to_fp32(operator: Any) -> Callable:
    def run(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        with _ExcludeDispatchKeyGuard(AUTOCAST):
            dtype = next((arg for arg in (*args, kwargs.get("dtype")) if isinstance(arg, torch.dtype)), None)
            if dtype is None and first.dtype in HALF:
                return operator(first, *(arg for arg in args if arg is not None), **(kwargs | {"dtype": torch.float32}))
            return operator(first, *args, **kwargs)

    return run


SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")
"""Parts of the RuntimeErrors of torch's allocators (CUDA, MPS, CPU, Windows) and NVIDIA's libraries."""


class OutOfMemory(Exception):
    """An allocation failed. The message is the requested size, or empty if it is not known."""


@contextmanager
def as_out_of_memory() -> Generator[None]:
    """Raises an OutOfMemory instead of the error that an allocator of torch, NumPy or Python raises inside."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(sign in str(error) for sign in SIGNS):
            raise
        if found := re.search(r"tried to allocate (\d+) bytes", str(error)):
            raise OutOfMemory(f"{int(found[1]) / 2**20:.1f} MiB") from error
        found = re.search(r"(?:tried|unable) to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
        raise OutOfMemory(found[1] if found else "") from error
