"""Binding of vectors: phasors in the Fourier domain as published, or signs in the Hadamard domain; whole or in blocks.

A content x and a key k are padded with zeros to length n and transformed. Every bin is scaled to magnitude 1, and the bins of
the content are multiplied with the conjugates of the key's bins (Algorithm 1 of holographic weight synthesis). All bins of the
key have magnitude 1, so binding is unitary: unbinding with the same key returns the phase-normalised content exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor

from holotrain.synthesis.transforms import Fourier, Hadamard, Transform, folded, next_power_of_two, units

Operation = Callable[[Transform, Tensor, Tensor], Tensor]


def phasor_bind(x: Tensor, key: Tensor, length: int | None = None, block_length: int | None = None) -> Tensor:
    """``irfft(X / |X| * conj(K / |K|))``: a circular correlation of the phases.

    Args:
        x: content (..., d), real floating; leading dimensions broadcast with the key's.
        key: (..., e).
        length: n of the transform, at least d and e; None: the next power of two.
        block_length: bind blocks of this many entries of x, each with the key, which is folded if it is longer. This is a
            partial convolution; its cost grows linearly with d.

    Returns:
        (..., n), or (..., d rounded up to whole blocks), in the dtype to which x and key promote. Half precision is
        transformed in fp32.

    The result has norm 1 if no bin of x is empty. An empty bin of x stays empty and lowers the norm: the squared norm is the
    share of the n frequencies that x has. So if x is zero, the result is zero. An empty bin of the key counts as 1, so a key of
    zeros does not change the phases of x. A bin is empty if its magnitude is at most four roundings of the largest.

    Raises:
        ValueError: a vector is empty, of integers or complex, or the length is too short.
    """
    return _apply(_bound, Fourier, x, key, length, block_length)


def phasor_unbind(bound: Tensor, key: Tensor, length: int | None = None, block_length: int | None = None) -> Tensor:
    """``irfft(rfft(bound) * K / |K|)``: undoes :func:`phasor_bind` with the same key and lengths, up to the magnitudes of x.

    Same arguments and result. The magnitudes of ``bound`` are kept, so it may be a sum of bound vectors.
    """
    return _apply(_unbound, Fourier, bound, key, length, block_length)


def hadamard_bind(x: Tensor, key: Tensor, length: int | None = None, block_length: int | None = None, seed: int = 0) -> Tensor:
    """Like :func:`phasor_bind`, with a randomised Walsh-Hadamard transform in place of Fourier: signs instead of phasors.

    Same arguments and result, but lengths are powers of two. It needs less arithmetic and keeps less of x: only signs. An empty
    bin of x counts as +1, so the result has norm 1 unless x is zero.

    Args:
        seed: of the random signs of the transform.
    """
    return _apply(_bound, partial(_hadamard, seed=seed), x, key, length, block_length)


def hadamard_unbind(
    bound: Tensor, key: Tensor, length: int | None = None, block_length: int | None = None, seed: int = 0
) -> Tensor:
    """Undoes :func:`hadamard_bind` with the same key, lengths and seed, up to the magnitudes of x."""
    return _apply(_unbound, partial(_hadamard, seed=seed), bound, key, length, block_length)


@lru_cache(maxsize=32)
def _hadamard(length: int, seed: int) -> Hadamard:
    """Cached between calls. Each keeps its signs and the factors of its matrix for every device and dtype that it has met."""
    return Hadamard(length, seed)


def _bound(transform: Transform, x: Tensor, key: Tensor) -> Tensor:
    content = units(transform.forward(x), empty=0) * units(transform.forward(key), empty=1).conj()
    return transform.inverse(content) / transform.length**0.5


def _unbound(transform: Transform, bound: Tensor, key: Tensor) -> Tensor:
    return transform.inverse(transform.forward(bound) * units(transform.forward(key), empty=1))


def _apply(
    operation: Operation, make: Callable[[int], Transform], x: Tensor, key: Tensor, length: int | None, block_length: int | None
) -> Tensor:
    for name, vector in (("the vector", x), ("the key", key)):
        if not vector.is_floating_point() or vector.ndim == 0 or vector.shape[-1] == 0:
            raise ValueError(
                f"{name} must be real and floating point, with at least one entry in the last dimension, not "
                f"{tuple(vector.shape)} of {vector.dtype}"
            )
    dtype = torch.promote_types(x.dtype, key.dtype)
    computed = torch.promote_types(dtype, torch.float32)
    x, key = x.to(computed), key.to(computed)
    if block_length is not None:
        if length is not None or block_length < 1:
            raise ValueError(f"block_length={block_length}: it must be at least 1, and it does not go together with length")
        blocks = torch.nn.functional.pad(x, (0, -x.shape[-1] % block_length)).unflatten(-1, (-1, block_length))
        result = operation(make(block_length), blocks, folded(key, block_length).unsqueeze(-2)).flatten(-2)
    else:
        longest = max(x.shape[-1], key.shape[-1])
        length = next_power_of_two(longest) if length is None else length
        if length < longest:
            raise ValueError(f"length={length} is shorter than a vector of {longest} entries")
        result = operation(make(length), folded(x, length), folded(key, length))
    return result.to(dtype)
