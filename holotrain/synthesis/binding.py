"""Binding of vectors: phasors in the Fourier domain as published, signs in the Hadamard domain, whole or block by block.

A content x and a key k, padded with zeros to one length n, are transformed; every bin of either is brought to magnitude 1,
and the content's is multiplied with the conjugate of the key's (Algorithm 1 of holographic weight synthesis). The key has
magnitude 1 throughout, so that binding is unitary: unbinding with the same key returns the phase-normalised content exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor

from holotrain.synthesis.transforms import Fourier, Hadamard, Transform, folded, next_power_of_two, units


def phasor_bind(x: Tensor, key: Tensor, length: int | None = None, block_length: int | None = None) -> Tensor:
    """``irfft(X / |X| * conj(K / |K|))``: a circular correlation of the phases.

    Args:
        x: content (..., d), real floating; leading dimensions broadcast with the key's.
        key: (..., e).
        length: n of the transform, at least d and e; None: the next power of two.
        block_length: bind x in blocks of so many entries, each with the key, folded to a block where it is longer: a partial
            convolution, whose price grows linearly with d.

    Returns:
        (..., n), or (..., d rounded up to whole blocks); in the dtype that x and key promote to. Half precision is
        transformed in fp32.

    The result has norm 1 if no bin of x is empty. An empty bin of x stays empty and its share of the norm is missing: the
    squared norm is the share of the n frequencies that x has. So an x of zeros gives zeros. An empty bin of the key counts
    as 1, so a key of zeros leaves the phases of x as they are. A bin is empty up to four roundings of the largest.

    Raises:
        ValueError: an empty vector, integers or complex numbers, a length that is too short.
    """
    return _apply(_bound, Fourier, x, key, length, block_length)


def phasor_unbind(bound: Tensor, key: Tensor, length: int | None = None, block_length: int | None = None) -> Tensor:
    """``irfft(rfft(bound) * K / |K|)``: undoes :func:`phasor_bind` with the same key and lengths, up to the magnitudes of x.

    Arguments and result as there; the magnitudes of ``bound`` are kept, so it may be a sum of bound vectors.
    """
    return _apply(_unbound, Fourier, bound, key, length, block_length)


def hadamard_bind(x: Tensor, key: Tensor, length: int | None = None, block_length: int | None = None, seed: int = 0) -> Tensor:
    """:func:`phasor_bind` with a randomised Walsh-Hadamard transform for the Fourier transform: signs for phasors.

    Arguments and result as there; lengths are powers of two. Cheaper in arithmetic, coarser in what it keeps: the signs alone.
    An empty bin of x counts as +1, so the result always has norm 1, unless x is zero.

    Args:
        seed: of the random signs that the transform begins with.
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
    operation: Callable[[Transform, Tensor, Tensor], Tensor],
    make: Callable[[int], Transform],
    x: Tensor,
    key: Tensor,
    length: int | None,
    block_length: int | None,
) -> Tensor:
    for name, vector in (("the vector", x), ("the key", key)):
        if not vector.is_floating_point() or vector.ndim == 0 or vector.shape[-1] == 0:
            raise ValueError(
                f"{name} must be real floating numbers with at least one entry in the last dimension, not "
                f"{tuple(vector.shape)} of {vector.dtype}"
            )
    dtype = torch.promote_types(x.dtype, key.dtype)
    computed = torch.promote_types(dtype, torch.float32)
    x, key = x.to(computed), key.to(computed)
    if block_length is not None:
        if length is not None or block_length < 1:
            raise ValueError(f"block_length={block_length}: it must be at least 1, and no length be given beside it")
        blocks = _in_blocks(x, block_length)
        result = operation(make(block_length), blocks, folded(key, block_length).unsqueeze(-2)).flatten(-2)
    else:
        longest = max(x.shape[-1], key.shape[-1])
        length = next_power_of_two(longest) if length is None else length
        if length < longest:
            raise ValueError(f"length={length} is shorter than a vector of {longest} entries")
        result = operation(make(length), folded(x, length), folded(key, length))
    return result.to(dtype)


def _in_blocks(x: Tensor, block_length: int) -> Tensor:
    """(..., d) -> (..., blocks, block_length), the last block padded with zeros."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % block_length)).unflatten(-1, (-1, block_length))
