"""The two-step coupling in one kernel for each direction, as custom operators with fake implementations.

They are for CUDA (:func:`is_fused`). Elsewhere, and where Triton is missing, :mod:`holotrain.reversible.two_step` computes the
same, bit for bit, by several operations.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._triton import has_triton_package

from holotrain.reversible.context import has_no_data


def is_fused(stream: Tensor) -> bool:
    """Whether kernels of Triton couple streams like this one."""
    if not stream.is_cuda or stream.dim() == 0 or is_traceable_wrapper_subclass(stream):
        return False
    return has_triton_package() if has_no_data(stream) else _works(stream.device)


@cache
def _works(device: torch.device) -> bool:
    """Whether Triton is installed and compiles for a device, which needs compute capability 8.0."""
    if not has_triton_package() or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    one, sign = torch.ones(1, 8, device=device), torch.ones(1, device=device)
    zero, numbers = torch.zeros((), device=device), (1.0, 1.0, 0.0, 0.0)
    run = partial(couple, one, one, one, sign, sign[0], zero, numbers, 0, False, torch.float32)
    return compiles(run, f"Triton cannot compile for {device}, so the coupling takes several kernels")


def compiles(run: Callable[[], object], otherwise: str) -> bool:
    """Whether a kernel of Triton runs, which needs a C compiler; if it does not, warns of what happens ``otherwise``."""
    try:
        run()
    except Exception as error:  # what is missing shows as errors of many kinds
        warnings.warn(f"{otherwise}: {error!s:.200}", stacklevel=3)
        return False
    return True


@lru_cache(maxsize=1024)
def factors(
    weights: tuple[float, float], bits: int | None, streams: torch.dtype, dtype: torch.dtype
) -> tuple[float, float, float, float]:
    """``a`` and ``1 - a - g``, each where the sign is 1 and where it is -1: computed in the dtype of the streams, then
    rounded to ``dtype``."""
    above, below = weights
    found = []
    for sign in (1, -1):
        gain = 0.0 if bits is None else sign * 2.0**-bits
        weight = _rounded(sign * _rounded((above - below) / 2, streams) + _rounded((above + below) / 2, streams), streams)
        rest = _rounded(_rounded(1 - weight, streams) - gain, streams)
        found.append((_rounded(weight, dtype), _rounded(rest, dtype)))
    (a, a_below), (rest, rest_below) = zip(*found, strict=True)
    return a, a_below, rest, rest_below


def _rounded(value: float, dtype: torch.dtype) -> float:
    return value if dtype == torch.float64 else struct.unpack("<f", struct.pack("<f", value))[0]


@torch.library.custom_op("holotrain::couple", mutates_args=("largest",))
def couple(
    target: Tensor,
    source: Tensor,
    update: Tensor,
    sign: Tensor,
    unit: Tensor,
    largest: Tensor,
    numbers: Sequence[float],
    bits: int,
    kept: bool,
    narrow: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """
    Args:
        sign: of each sample, 1 or -1.
        unit: the step of the grid, 0-dim.
        largest: 0-dim, raised to the largest magnitude of the coupled stream.
        numbers: what :func:`factors` returns.
        bits: m; 0 for a first block, which has no target.
        kept: keep the bits that the division of the target drops.
        narrow: the dtype of the third result.

    Returns:
        The coupled stream, with the strides of the update; the kept bits, uint8 (m, n / 8) or empty; and the stream in
        ``narrow``, empty if that is its own dtype.
    """
    from holotrain.reversible import coupling_kernels

    coupled, low, narrowed = _empty_results(update, source.dtype, bits if kept else 0, narrow)
    streams = (_in_layout_of(each, coupled) for each in (target, source, update))
    coupling_kernels.couple(*streams, sign, unit, largest, coupled, narrowed, low, numbers, bits)
    return coupled, low, narrowed


@couple.register_fake
def _(target, source, update, sign, unit, largest, numbers, bits, kept, narrow):
    return _empty_results(update, source.dtype, bits if kept else 0, narrow)


def _empty_results(update: Tensor, dtype: torch.dtype, planes: int, narrow: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    coupled = torch.empty_like(update, dtype=dtype)
    low = update.new_empty((planes, -(-update.numel() // 8)) if planes else (0,), dtype=torch.uint8)
    narrowed = update.new_empty(0, dtype=narrow) if narrow == dtype else torch.empty_like(update, dtype=narrow)
    return coupled, low, narrowed


@torch.library.custom_op("holotrain::uncouple", mutates_args=("target", "narrow"))
def uncouple(
    target: Tensor,
    narrow: Tensor,
    coupled: Tensor,
    source: Tensor,
    update: Tensor,
    sign: Tensor,
    unit: Tensor,
    low: Tensor,
    numbers: Sequence[float],
    bits: int,
) -> None:
    """Writes into ``target`` what :func:`couple` was given as it, and into ``narrow``, unless it is empty, the same in another
    dtype. ``target`` may be ``coupled``."""
    from holotrain.reversible import coupling_kernels

    # The kept bits are in the order of the coupled stream's memory.
    written = [
        each if not each.numel() or _alike(each, coupled) else torch.empty_like(coupled, dtype=each.dtype)
        for each in (target, narrow)
    ]
    read = [_in_layout_of(each, coupled) for each in (source, update)]
    coupling_kernels.uncouple(coupled, *read, sign, unit, low, *written, numbers, bits)
    for result, own in zip((target, narrow), written, strict=True):
        if own is not result:
            result.copy_(own)


@uncouple.register_fake
def _(target, narrow, coupled, source, update, sign, unit, low, numbers, bits):
    return None


@torch.library.custom_op("holotrain::coupling_gradients", mutates_args=())
def gradients(
    grad: Tensor,
    narrow: Tensor | None,
    passed: Tensor | None,
    sign: Tensor,
    numbers: Sequence[float],
    gain: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """
    Args:
        grad, narrow: of the coupled stream; their sum is the gradient.
        passed: of the stream after the next, of which ``gain``, with the sign, comes from the source.
        numbers: what :func:`factors` returns.
        dtype: of the update.

    Returns:
        The sum, empty without ``narrow``; the gradients of the source and of the update.
    """
    from holotrain.reversible import coupling_kernels

    total, of_source, of_update = results = _empty_gradients(grad, narrow, dtype)
    nothing = grad.new_empty(0)
    read = (nothing if each is None else _in_layout_of(each, of_source) for each in (grad, narrow, passed))
    coupling_kernels.gradients(*read, sign, total, of_source, of_update, numbers, gain)
    return results


@gradients.register_fake
def _(grad, narrow, passed, sign, numbers, gain, dtype):
    return _empty_gradients(grad, narrow, dtype)


def _empty_gradients(grad: Tensor, narrow: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    total = grad.new_empty(0) if narrow is None else torch.empty_like(grad)
    return total, torch.empty_like(grad), torch.empty_like(grad, dtype=dtype)


def _in_layout_of(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor in the layout of another of the same shape; a copy, unless it has it."""
    return tensor if _alike(tensor, like) else torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)


def _alike(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors of a shape have the same layout."""
    strides = zip(tensor.stride(), other.stride(), tensor.shape, strict=True)
    return all(own == its or size == 1 for own, its, size in strides)
