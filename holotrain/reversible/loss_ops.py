"""The cross-entropy of a tile in one kernel, which writes the gradients over the logits; a custom operator with a fake
implementation.

It is for CUDA (:func:`is_fused`). Elsewhere it is ``torch.nn.functional.cross_entropy``. (Liger Kernel, arXiv 2410.10989.)
"""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._triton import has_triton_package

from holotrain.reversible.context import has_no_data

HALF = (torch.bfloat16, torch.float16)


def is_fused(logits: Tensor) -> bool:
    """Whether a kernel of Triton takes logits like these."""
    if logits.dtype not in (torch.float32, *HALF) or not logits.is_cuda or is_traceable_wrapper_subclass(logits):
        return False
    return has_triton_package() if has_no_data(logits) else _works(logits.device)


@cache
def _works(device: torch.device) -> bool:
    """Whether Triton is installed and compiles for a device, which needs a C compiler and compute capability 8.0."""
    if not has_triton_package() or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    logits, labels = torch.zeros(1, 8, device=device), torch.zeros(1, dtype=torch.long, device=device)
    try:
        cross_entropy(logits, labels, -100, True)
    except Exception as error:  # what is missing shows as errors of many kinds
        warnings.warn(f"Triton cannot compile for {device}, so the loss takes torch's operations: {error!s:.200}", stacklevel=3)
        return False
    return True


def summed_cross_entropy(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """The sum of the cross-entropies, as ``F.cross_entropy`` of ``logits.float()``. With gradients, these take the place of the
    logits, which nothing else may read from here on. A row without a label has no loss, and gradients of zero.

    Args:
        logits: (N, V), in fp32, bf16 or fp16.
        labels: (N) integers in [0, V), or ``ignored``. Others stop the program, in CUDA with an assertion of the device.

    Returns:
        A number in fp32.
    """
    words = logits.shape[1]
    # Without a wait for the device. The kernel gives NaN for such a label, and reads nothing there.
    known = (labels == ignored) | ((labels >= 0) & (labels < words))
    torch._assert_async(known.all(), f"a label is neither {ignored} nor in [0, {words})")
    if logits.stride(1) != 1 or logits.stride(0) < words:
        logits = logits.contiguous()
    return _CrossEntropy.apply(logits, labels, ignored, logits.requires_grad and torch.is_grad_enabled())


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, ignored: int, differentiate: bool) -> Tensor:
        ctx.gradients = logits.detach()  # not saved as a view, which autograd refuses where its base has changed
        return cross_entropy(ctx.gradients, labels, ignored, differentiate).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the gradients of this cross-entropy are given once; a second backward needs a second forward")
        gradients, ctx.gradients = ctx.gradients, None
        scale(gradients, gradient)
        return gradients, None, None, None


@torch.library.custom_op("holotrain::cross_entropy", mutates_args=("logits",))
def cross_entropy(logits: Tensor, labels: Tensor, ignored: int, differentiate: bool) -> Tensor:
    """The loss of each row, fp32. To ``differentiate``, the gradients of their sum are written over the logits."""
    from holotrain.reversible import loss_kernels

    losses = logits.new_empty(len(logits), dtype=torch.float32)
    loss_kernels.cross_entropy(logits, labels.contiguous(), losses, ignored, differentiate)
    return losses


@cross_entropy.register_fake
def _(logits, labels, ignored, differentiate):
    return logits.new_empty(len(logits), dtype=torch.float32)


@torch.library.custom_op("holotrain::scale_gradients", mutates_args=("gradients",))
def scale(gradients: Tensor, factor: Tensor) -> None:
    """Multiplies in place. Where the factor is one, as for a sum over tiles, nothing is read or written."""
    from holotrain.reversible import loss_kernels

    loss_kernels.scale(gradients, factor)


@scale.register_fake
def _(gradients, factor):
    return None


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds a product of matrices to ``total``, which may be in fp32 where they are in half precision."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif adds_in_product(total, left.dtype):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def adds_in_product(total: Tensor, operands: torch.dtype) -> bool:
    """Whether a product can add to a sum in fp32, without a temporary of its size."""
    if not total.is_cuda or total.dtype != torch.float32 or operands not in HALF:
        return False
    return _adds_in_product(total.device, operands, has_no_data(total))


@cache
def _adds_in_product(device: torch.device, operands: torch.dtype, fake: bool) -> bool:
    """Tried, since it depends on the library of the device and, with ``fake`` tensors, on torch: 2.13 or later."""
    total, one = torch.empty(1, 1, device=device), torch.empty(1, 1, device=device, dtype=operands)
    try:
        torch.addmm(total, one, one, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):  # NotImplementedError is a RuntimeError
        return False
    return True
