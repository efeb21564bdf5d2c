"""The Triton kernels of the two-step coupling: one for each direction, and one for gradients. Imported only with Triton.

Elements are taken in the order of memory, eight neighbours at a time: their dropped bits fill one byte of each plane, and there
are m planes. ``sample_stride`` is the stride of the first dimension, ``batch`` its size; they tell the sample of an element in
any layout without gaps.

No product and sum may be contracted to one operation, which rounds differently: kernels are launched with
``enable_fp_fusion=False``, and both directions call :func:`_step`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

EIGHTS = 128
"""Groups of eight elements that one program takes."""

PLAIN = ["planes", "weight_above", "weight_below", "rest_above", "rest_below", "gain"]
"""Parameters of whose values Triton makes no constants."""


@triton.jit
def _number(value, dtype: tl.constexpr):
    """Triton passes numbers in fp32; those of fp64 come as the integer with the same bits."""
    if dtype == tl.float64:  # noqa: SIM108
        number = value.to(tl.int64).to(tl.float64, bitcast=True)
    else:
        number = value
    return number


@triton.jit
def _cast(x, result):
    """In the dtype of a result; half precision by way of fp32, as torch rounds fp64."""
    if result.dtype.element_ty.primitive_bitwidth == 16:
        x = x.to(tl.float32)
    return x.to(result.dtype.element_ty)


@triton.jit
def _nearest(x):
    """The nearest integer, to even where two are as near."""
    if x.dtype == tl.float64:
        whole: tl.constexpr = 4503599627370496.0  # 2^52: a sum with it has no fraction
    else:
        whole: tl.constexpr = 8388608.0  # 2^23
    size = tl.abs(x)
    rounded = (size + whole) - whole
    return tl.where(size < whole, tl.where(x < 0, -rounded, rounded), x)


@triton.jit
def _inverse(unit):
    """1 / unit, which is exact for a power of two."""
    return (1.0 / unit.to(tl.float64)).to(unit.dtype)


@triton.jit
def _step(source, update, place, here, positive, unit, weight_above, weight_below, rest_above, rest_below):
    """``a block(x) + (1 - a - g) x`` on the grid of ``unit``, for both directions."""
    x = tl.load(source + place, mask=here, other=0.0)
    dtype: tl.constexpr = x.dtype
    weight = tl.where(positive, _number(weight_above, dtype), _number(weight_below, dtype))
    rest = tl.where(positive, _number(rest_above, dtype), _number(rest_below, dtype))
    output = tl.load(update + place, mask=here, other=0.0).to(dtype)
    return _nearest((output * weight + x * rest) * _inverse(unit)) * unit


@triton.jit
def _places(count, WIDE: tl.constexpr, EIGHTS: tl.constexpr):
    """The places of a program's groups of eight, (EIGHTS, 1), and of their elements, (EIGHTS, 8)."""
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    group = program * EIGHTS + tl.arange(0, EIGHTS)[:, None]
    place = group * 8 + tl.arange(0, 8)[None, :]
    return group, place, place < count


@triton.jit
def _positive(sign, group, place, here, sample_stride, batch, ALIGNED: tl.constexpr):
    """Whether the sign of each element's sample is 1; ``ALIGNED``: eight neighbours are of one sample."""
    if ALIGNED:
        found = tl.load(sign + (group * 8 // sample_stride) % batch)
    else:
        found = tl.load(sign + (place // sample_stride) % batch, mask=here, other=1.0)
    return (found > 0) & here


@triton.jit(do_not_specialize=PLAIN[:5])
def _couple(
    target, source, update, sign, unit_at, largest, coupled, narrow, low,
    count, sample_stride, batch, planes, weight_above, weight_below, rest_above, rest_below,
    BITS: tl.constexpr, KEPT: tl.constexpr, NARROW: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr,
    EIGHTS: tl.constexpr,
):  # fmt: skip
    group, place, here = _places(count, WIDE, EIGHTS)
    positive = _positive(sign, group, place, here, sample_stride, batch, ALIGNED)
    unit = tl.load(unit_at)
    planes = planes.to(group.dtype)  # bit * planes may be large
    total = _step(source, update, place, here, positive, unit, weight_above, weight_below, rest_above, rest_below)
    if BITS > 0:
        before = tl.load(target + place, mask=here, other=0.0) * _inverse(unit)
        whole = tl.floor(before * (1.0 / (1 << BITS)))
        if KEPT:
            dropped = (before - whole * (1 << BITS)).to(tl.int32)
            for bit in tl.static_range(BITS):
                byte = tl.sum(((dropped >> bit) & 1) << tl.arange(0, 8)[None, :], axis=1)
                tl.store(low + bit * planes + group, byte[:, None].to(tl.uint8), mask=group < planes)
        whole = whole * unit
        total = total + tl.where(positive, whole, -whole)
    tl.store(coupled + place, total, mask=here)
    if NARROW:
        tl.store(narrow + place, _cast(total, narrow), mask=here)
    size = tl.where(total == total, tl.abs(total), float("inf"))  # a maximum passes NaN over
    tl.atomic_max(largest, tl.max(tl.max(tl.where(here, size, 0.0), axis=1), axis=0))


@triton.jit(do_not_specialize=PLAIN[:5])
def _uncouple(
    coupled, source, update, sign, unit_at, low, target, narrow,
    count, sample_stride, batch, planes, weight_above, weight_below, rest_above, rest_below,
    BITS: tl.constexpr, NARROW: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr, EIGHTS: tl.constexpr,
):  # fmt: skip
    group, place, here = _places(count, WIDE, EIGHTS)
    positive = _positive(sign, group, place, here, sample_stride, batch, ALIGNED)
    unit = tl.load(unit_at)
    planes = planes.to(group.dtype)
    step = _step(source, update, place, here, positive, unit, weight_above, weight_below, rest_above, rest_below)
    whole = tl.load(coupled + place, mask=here, other=0.0) - step
    dropped = tl.zeros([EIGHTS, 8], dtype=tl.int32)
    for bit in tl.static_range(BITS):
        byte = tl.load(low + bit * planes + group, mask=group < planes, other=0).to(tl.int32)
        dropped |= ((byte >> tl.arange(0, 8)[None, :]) & 1) << bit
    before = tl.where(positive, whole, -whole) * (1 << BITS) + dropped.to(unit.dtype) * unit
    tl.store(target + place, before, mask=here)
    if NARROW:
        tl.store(narrow + place, _cast(before, narrow), mask=here)


@triton.jit(do_not_specialize=PLAIN[1:])
def _gradients(
    grad, narrow, passed, sign, total, of_source, of_update,
    count, sample_stride, batch, weight_above, weight_below, rest_above, rest_below, gain,
    NARROW: tl.constexpr, PASSED: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr, EIGHTS: tl.constexpr,
):  # fmt: skip
    group, place, here = _places(count, WIDE, EIGHTS)
    positive = _positive(sign, group, place, here, sample_stride, batch, ALIGNED)
    found = tl.load(grad + place, mask=here, other=0.0)
    dtype: tl.constexpr = found.dtype
    if NARROW:
        found += tl.load(narrow + place, mask=here, other=0.0).to(dtype)
        tl.store(total + place, found, mask=here)
    weight = tl.where(positive, _number(weight_above, dtype), _number(weight_below, dtype))
    rest = tl.where(positive, _number(rest_above, dtype), _number(rest_below, dtype))
    tl.store(of_update + place, _cast(found * weight, of_update), mask=here)
    through = found * rest
    if PASSED:
        later = tl.load(passed + place, mask=here, other=0.0) * _number(gain, dtype)
        through += tl.where(positive, later, -later)
    tl.store(of_source + place, through, mask=here)


def _launch(kernel: Any, like: Tensor, tensors: Sequence[Tensor], numbers: Sequence[float], **constants: Any) -> None:
    """Runs a kernel over the elements of ``like``, on its device."""
    count, stride = like.numel(), like.stride(0)
    if not count:
        return
    constants |= {"ALIGNED": stride % 8 == 0, "WIDE": count >= 2**31 - 8 * EIGHTS, "EIGHTS": EIGHTS}
    sizes, grid = (count, max(stride, 1), len(like)), (-(-count // (8 * EIGHTS)),)
    with torch.cuda.device_of(like):
        kernel[grid](*tensors, *sizes, *numbers, **constants, num_warps=4, enable_fp_fusion=False)


def couple(
    target: Tensor, source: Tensor, update: Tensor, sign: Tensor, unit: Tensor, largest: Tensor, coupled: Tensor,
    narrow: Tensor, low: Tensor, numbers: Sequence[float], bits: int,
) -> None:  # fmt: skip
    """Writes ``coupled`` and, unless they are empty, ``narrow``, the same in another dtype, and ``low``, the bits that are
    dropped of the target, (bits, n / 8). Raises ``largest`` to the largest magnitude.

    Args:
        target, source, update, coupled, narrow: of one layout without gaps.
        sign: one for each sample.
        numbers: a and 1 - a - g, each where the sign is 1 and where it is -1.
        bits: m; 0: the target is not used.
    """
    flags = {"BITS": bits, "KEPT": low.numel() > 0, "NARROW": narrow.numel() > 0}
    tensors = (target, source, update, sign, unit, largest, coupled, narrow, low)
    _launch(_couple, coupled, tensors, [low.shape[-1], *_numbers(numbers, coupled.dtype)], **flags)


def uncouple(
    coupled: Tensor, source: Tensor, update: Tensor, sign: Tensor, unit: Tensor, low: Tensor, target: Tensor, narrow: Tensor,
    numbers: Sequence[float], bits: int,
) -> None:  # fmt: skip
    """Writes the ``target`` that :func:`couple` was given, which may be the memory of ``coupled``, and ``narrow``, the same in
    another dtype, unless it is empty."""
    flags = {"BITS": bits, "NARROW": narrow.numel() > 0}
    tensors = (coupled, source, update, sign, unit, low, target, narrow)
    _launch(_uncouple, coupled, tensors, [low.shape[-1], *_numbers(numbers, coupled.dtype)], **flags)


def gradients(
    grad: Tensor, narrow: Tensor, passed: Tensor, sign: Tensor, total: Tensor, of_source: Tensor, of_update: Tensor,
    numbers: Sequence[float], gain: float,
) -> None:  # fmt: skip
    """Writes those of the source and of the update, from those of the coupled stream, ``grad + narrow``, and of the stream
    after the next, ``passed``, of which ``gain`` with the sign comes from the source. ``narrow`` and ``passed`` may be empty;
    without ``narrow``, ``total``, the sum, is not written."""
    flags = {"NARROW": narrow.numel() > 0, "PASSED": passed.numel() > 0}
    tensors = (grad, narrow, passed, sign, total, of_source, of_update)
    _launch(_gradients, grad, tensors, _numbers((*numbers, gain), grad.dtype), **flags)


def _numbers(values: Sequence[float], dtype: torch.dtype) -> list[float] | list[int]:
    """As kernels take them, see :func:`_number`."""
    if dtype == torch.float64:
        return [struct.unpack("<q", struct.pack("<d", value))[0] for value in values]
    return list(values)
