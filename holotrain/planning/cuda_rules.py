"""What operations do on CUDA, on fake tensors of a CPU.

A plan for a GPU runs on fake tensors of a CPU, because autograd's engine asks a driver about tensors of a GPU. They differ in

- autocast. On CUDA norms, softmax, sums and powers give fp32 (``AT_FORALL_FP32`` of ATen/autocast_mode.h), on a CPU they keep
  half precision, and a cross entropy copies the logits to fp32;
- dropout, which on CUDA keeps a mask of bytes, and on a CPU one of numbers;
- dropout in attention, which on CUDA is within its kernel, without a tensor of attention weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _dispatch_has_kernel_for_dispatch_key, _ExcludeDispatchKeyGuard
from torch.library import fallthrough_kernel
from torch.nn import functional

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

HALF = (torch.bfloat16, torch.float16)
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
