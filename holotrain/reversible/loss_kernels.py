"""The Triton kernels of the cross-entropy: one for losses and gradients, and one that scales these. Imported only with Triton.

One program takes one row, the logits of a token, block by block: first for the largest one and the sum of exponentials, which
is corrected whenever a larger one comes (online softmax, arXiv 1805.02867), then for the gradients, which take the logits'
place. All is computed in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_WORDS = 4096
"""Logits in a block, at most."""


@triton.jit(do_not_specialize=["ignored"])
def _cross_entropy(
    logits, labels, losses, stride, words, ignored,
    DIFFERENTIATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label = tl.load(labels + row)
    if label == ignored:
        tl.store(losses + row, 0.0)
        if DIFFERENTIATE:
            for start in range(0, words, BLOCK):
                place = start + tl.arange(0, BLOCK)
                tl.store(logits + place, tl.zeros([BLOCK], logits.dtype.element_ty), mask=place < words)
    else:
        here = (label >= 0) & (label < words)
        labelled = tl.load(logits + label, mask=here, other=float("nan")).to(tl.float32)
        largest = float("-inf")
        total = 0.0
        for start in range(0, words, BLOCK):
            place = start + tl.arange(0, BLOCK)
            x = tl.load(logits + place, mask=place < words, other=float("-inf")).to(tl.float32)
            before = largest
            largest = tl.maximum(before, tl.max(x, axis=0))
            base = tl.where(largest == float("-inf"), 0.0, largest)  # the difference of two infinities is no number
            total = total * tl.exp(before - base) + tl.sum(tl.exp(x - base), axis=0)
        tl.store(losses + row, tl.log(total) - (labelled - largest))
        if DIFFERENTIATE:
            inverse = 1.0 / total
            for start in range(0, words, BLOCK):
                place = start + tl.arange(0, BLOCK)
                x = tl.load(logits + place, mask=place < words, other=0.0).to(tl.float32)
                gradient = tl.exp(x - largest) * inverse
                gradient = tl.where(place == label, gradient - 1.0, gradient)
                tl.store(logits + place, gradient.to(logits.dtype.element_ty), mask=place < words)


@triton.jit
def _scale(gradients, scale, stride, words, BLOCK: tl.constexpr):
    factor = tl.load(scale)
    if factor != 1.0:  # else nothing is read or written
        gradients += tl.program_id(0).to(tl.int64) * stride
        for start in range(0, words, BLOCK):
            place = start + tl.arange(0, BLOCK)
            x = tl.load(gradients + place, mask=place < words, other=0.0).to(tl.float32)
            tl.store(gradients + place, (x * factor).to(gradients.dtype.element_ty), mask=place < words)


def _launch(kernel: Any, rows: Tensor, *arguments: Any, **constants: Any) -> None:
    """Runs a kernel over the rows of a matrix, on its device."""
    count, words = rows.shape
    if not rows.numel():
        return
    constants["BLOCK"] = min(triton.next_power_of_2(words), MOST_WORDS)
    with torch.cuda.device_of(rows):
        kernel[(count,)](rows, *arguments, **constants, num_warps=8 if words > 1024 else 4)


def cross_entropy(logits: Tensor, labels: Tensor, losses: Tensor, ignored: int, differentiate: bool) -> None:
    """Writes the loss of each row and, to ``differentiate``, its gradients over the logits.

    Args:
        logits: (N, V), neighbours in a row being neighbours in memory.
        labels: (N) integers, without gaps.
        losses: (N), fp32.
    """
    if not logits.shape[1]:  # no label is a word
        losses.fill_(torch.nan).masked_fill_(labels == ignored, 0.0)
    _launch(_cross_entropy, logits, labels, losses, logits.stride(0), logits.shape[1], ignored, DIFFERENTIATE=differentiate)


def scale(gradients: Tensor, factor: Tensor) -> None:
    """Multiplies (N, V) gradients by a number on their device, in place."""
    _launch(_scale, gradients, factor, gradients.stride(0), gradients.shape[1])
